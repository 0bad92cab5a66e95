"""Lending whole matrices over real ranks: any placement, counted collectives, ranks that disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from live_bytes import live_now, measure
from ranks import ranks
from sharding import shard
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp.optim.lend import Lender, Replicas, Run, flat_local, lend
from vescale_fsdp.optim.matrices import Matrix, matrices_of

Shape = tuple[int, ...]
SEVERAL_MESHES: list[tuple[Shape, list[Any]]] = [((4,), [Shard(0)]), ((2, 2), [RaggedShard((0,), (1, 3)), Shard(1)])]


def fulls(*shapes: Shape) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def whole_softmax(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
    """Something that needs the whole matrix."""
    return [value / value.norm() + value.sum() for value in values]


def expected(full: Tensor) -> Tensor:
    flat = full.reshape(-1).clone()
    for matrix in matrices_of(full.shape):
        value = flat[matrix.begin : matrix.end]
        flat[matrix.begin : matrix.end] = value / value.norm() + value.sum()
    return flat.view(full.shape)


def check(tensor: DTensor, full: Tensor) -> None:
    wanted = shard(expected(full), tensor.device_mesh, tensor.placements).to_local()
    torch.testing.assert_close(tensor.to_local(), wanted)


@contextmanager
def counted_collectives() -> Iterator[list[Any]]:
    calls: list[Any] = []
    original = dist.all_to_all_single

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    with patch.object(dist, "all_to_all_single", count):
        yield calls


def by_world(num_ranks: int) -> Sequence[int]:
    return [(7, 3, 0, 5, 2)[rank % 5] for rank in range(num_ranks)]


@ranks(1, 2, 3, 4)
def test_ragged_even_and_whole_tensors_are_computed_whole() -> None:
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n,))
    units = by_world(n)
    originals = fulls((sum(units), 4), (4 * sum(units), 3), (6, 5), (1, 9), (9, 1), (5, 4, 3), (4, 3, 2, 2))
    placements: list[Any] = [
        RaggedShard((0,), units),
        RaggedShard((0, 1), units),
        RaggedShard((0,), [int(r == n - 1) for r in range(n)]),
        Shard(0),
        Shard(0),
        Shard(0),
        Shard(1),
    ]
    tensors = [shard(full, mesh, [p]) for full, p in zip(originals, placements, strict=True)]
    lend(tensors, whole_softmax, bucket_nbytes=200)
    for tensor, full in zip(tensors, originals, strict=True):
        check(tensor, full)


LAYOUTS_2D: list[tuple[Shape, list[Any]]] = [
    ((8, 6), [Replicate(), RaggedShard((0, 1), (1, 2))]),
    ((8, 6), [Replicate(), Shard(0)]),
    ((8, 6), [RaggedShard((0,), (1, 3)), Shard(1)]),
    ((8, 6), [StridedRaggedShard((0,), (1, 3), 2), Shard(0)]),
    ((8, 6), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((8, 6), [RaggedShard((0,), (3, 5)), Replicate()]),
    ((4, 4, 3), [RaggedShard((0,), (1, 3)), Shard(1)]),
    ((4, 4, 3), [StridedRaggedShard((0,), (0, 1), 2), Shard(0)]),
]


@ranks(4)
@pytest.mark.parametrize("replicas", list(Replicas))
def test_two_mesh_axes_in_any_combination(replicas: Replicas) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    originals = fulls(*(shape for shape, _ in LAYOUTS_2D))
    tensors = [shard(full, mesh, p) for full, (_, p) in zip(originals, LAYOUTS_2D, strict=True)]
    lend(tensors, whole_softmax, bucket_nbytes=400, replicas=replicas)
    for tensor, full in zip(tensors, originals, strict=True):
        check(tensor, full)


@ranks(4)
@pytest.mark.parametrize(("replicas", "times"), [(Replicas.REPEAT, 2), (Replicas.SHARE, 1)])
def test_replicas_repeat_work_unless_asked_to_share_it(replicas: Replicas, times: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    tensors = [shard(full, mesh, [Replicate(), RaggedShard((0,), (1, 2))]) for full in fulls(*[(6, 4)] * 5)]
    computed: list[Matrix] = []

    def compute(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        computed.extend(matrices)
        return values

    lend(tensors, compute, replicas=replicas)
    total = torch.tensor(len(computed))
    dist.all_reduce(total)
    assert total == 5 * times


@ranks(4)
@pytest.mark.parametrize("num_matrices", [6, 24])
def test_two_collectives_per_bucket_and_axis_however_many_matrices(num_matrices: int) -> None:
    for sizes, placements in [((4,), [Shard(0)]), ((2, 2), [RaggedShard((0,), (1, 3)), Shard(1)])]:
        mesh = init_device_mesh("cpu", sizes)
        tensors = [shard(full, mesh, placements) for full in fulls(*[(8, 4)] * num_matrices)]
        for bucket_nbytes in (10**6, 4 * 32 * 3):
            lender = Lender(tensors, bucket_nbytes=bucket_nbytes)
            with counted_collectives() as calls:
                lender(lambda runs: [torch.zeros(run.numel) for run in runs], lambda _, values: values, lambda *_: None)
            assert len(calls) == 2 * lender.num_buckets * len(sizes)
            if bucket_nbytes == 10**6:
                assert lender.num_buckets == 1


@ranks(3)
def test_what_lies_whole_on_one_rank_is_computed_there_without_a_collective_or_a_copy() -> None:
    mesh = init_device_mesh("cpu", (3,))
    tensors = [
        shard(f, mesh, [RaggedShard((0, 1), [int(r == i) for r in range(3)])])
        for i, f in enumerate(fulls(*[(4, 4)] * 3))
    ]
    here = tensors[dist.get_rank()].to_local()

    def compute(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        assert [matrix.tensor for matrix in matrices] == [dist.get_rank()]
        assert values[0].data_ptr() == here.data_ptr()
        return [2 * values[0]]

    before = here.clone()
    with counted_collectives() as calls:
        lend(tensors, compute)
    assert not calls
    assert torch.equal(here, 2 * before)


@ranks(4)
def test_no_more_than_two_buckets_of_elements_are_under_way_or_computed() -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensors = [shard(full, mesh, [Shard(0)]) for full in fulls(*[(8, 4)] * 40)]
    lender = Lender(tensors, bucket_nbytes=4 * 64)
    assert lender.num_buckets == 5
    computed: list[int] = []

    def compute(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        computed.append(sum(value.numel() for value in values))
        return values

    read_before_compute: list[int] = []
    num_read = 0

    def read(runs: Sequence[Run]) -> list[Tensor]:
        nonlocal num_read
        num_read += 1
        read_before_compute.append(num_read - len(computed))
        return [torch.zeros(run.numel) for run in runs]

    lender(read, compute, lambda *_: None)
    assert max(computed) <= 64
    assert max(read_before_compute) == 2


@ranks(4)
@pytest.mark.parametrize("num_matrices", [24, 72])
def test_a_step_holds_six_buckets_of_bytes_at_most_however_many_matrices_there_are(num_matrices: int) -> None:
    """Two buckets under way, each with what is sent, what is received, and matrices or results."""
    bucket_nbytes = 4 * 64 * 64 * 4
    for sizes, placements in SEVERAL_MESHES:
        tensors = [shard(torch.ones(64, 64), init_device_mesh("cpu", sizes), placements) for _ in range(num_matrices)]
        lender = Lender(tensors, bucket_nbytes=bucket_nbytes)
        flat = [flat_local(tensor, "") for tensor in tensors]

        def read(runs: Sequence[Run], flat: list[Tensor] = flat) -> list[Tensor]:
            return [run.of(flat[run.matrix.tensor]) for run in runs]

        def write(runs: Sequence[Run], results: Sequence[Tensor], flat: list[Tensor] = flat) -> None:
            for run, result in zip(runs, results, strict=True):
                run.of(flat[run.matrix.tensor]).copy_(result)

        negate = partial(lender, read, lambda _, values: [-value for value in values], write)
        before = live_now()
        peak = measure(negate).peak - before
        assert bucket_nbytes < peak <= 6 * bucket_nbytes, peak / bucket_nbytes
        assert all(torch.equal(each, -torch.ones_like(each)) for each in flat)


@ranks(2, 4)
def test_ranks_that_disagree_on_what_is_missing_all_raise_before_anything_is_written() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [shard(full, mesh, [Shard(0)]) for full in fulls((8, 4), (8, 4))]
    lender = Lender(tensors, names=["first", "second"])
    absent = frozenset({1} if dist.get_rank() == 1 else ())
    written: list[Any] = []
    with pytest.raises(ValueError, match="second: some ranks have a gradient for it and others have none"):
        lender(zeros, lambda _, values: values, lambda *args: written.append(args), absent=absent)
    assert not written


def zeros(runs: Sequence[Run]) -> list[Tensor]:
    return [torch.zeros(run.numel) for run in runs]


@ranks(4)
@pytest.mark.parametrize("bucket_nbytes", [10**6, 4 * 32 * 3])
def test_a_compute_that_raises_on_one_rank_makes_all_ranks_raise(bucket_nbytes: int) -> None:
    for sizes, placements in SEVERAL_MESHES:
        tensors = [shard(full, init_device_mesh("cpu", sizes), placements) for full in fulls(*[(8, 4)] * 12)]
        calls: list[int] = []

        def compute(matrices: Sequence[Matrix], values: list[Tensor], calls: list[int] = calls) -> list[Tensor]:
            calls.append(len(values))
            if dist.get_rank() == 2:
                raise RuntimeError("out of memory, say")
            return values

        expected = (RuntimeError, "out of memory, say") if dist.get_rank() == 2 else (ValueError, "Another rank failed")
        with pytest.raises(expected[0], match=expected[1]):
            lend(tensors, compute, bucket_nbytes=bucket_nbytes)
        assert len(calls) <= 2


@ranks(4)
def test_a_read_that_raises_on_one_rank_makes_all_ranks_raise_before_anything_is_written() -> None:
    for sizes, placements in SEVERAL_MESHES:
        lender = Lender([shard(full, init_device_mesh("cpu", sizes), placements) for full in fulls(*[(8, 4)] * 3)])
        seen: list[Any] = []

        def read(runs: Sequence[Run]) -> list[Tensor]:
            if dist.get_rank() == 1:
                raise RuntimeError("nothing to read")
            return zeros(runs)

        def see(*things: Any, seen: list[Any] = seen) -> Any:
            seen.append(things)
            return things[1]

        expected = (RuntimeError, "nothing to read") if dist.get_rank() == 1 else (ValueError, "Another rank failed")
        with pytest.raises(expected[0], match=expected[1]):
            lender(read, see, see)
        assert not seen


@ranks(2)
def test_a_write_that_raises_in_an_early_bucket_stops_the_others() -> None:
    tensors = [shard(full, init_device_mesh("cpu", (2,)), [Shard(0)]) for full in fulls(*[(8, 4)] * 8)]
    lender = Lender(tensors, bucket_nbytes=4 * 32)
    written: list[int] = []

    def write(runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        written.append(len(runs))
        if dist.get_rank() == 0:
            raise RuntimeError("read-only")

    with pytest.raises(RuntimeError if dist.get_rank() == 0 else ValueError, match=r"read-only|Another rank failed"):
        lender(zeros, lambda _, values: values, write)
    assert lender.num_buckets == 4
    assert len(written) == 1


@ranks(1, 3)
def test_what_is_missing_everywhere_is_neither_computed_nor_written() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [shard(full, mesh, [Shard(0)]) for full in fulls((8, 4), (8, 4))]
    seen: set[int] = set()

    def note(runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        seen.update(run.matrix.tensor for run in runs)

    def compute(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        seen.update(matrix.tensor for matrix in matrices)
        return values

    assert Lender(tensors)(zeros, compute, note, absent=frozenset({1})) == {1}
    assert 1 not in seen


@ranks(2)
def test_a_rank_without_any_part_has_no_say_in_what_is_missing() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = [
        shard(full, mesh, [p])
        for full, p in zip(fulls((4, 4), (4, 4)), [RaggedShard((0,), (0, 1)), Shard(0)], strict=True)
    ]
    absent = frozenset({0} if dist.get_rank() == 0 else ())
    written: list[int] = []

    def note(runs: Sequence[Run], results: Sequence[Tensor]) -> None:
        written.extend(run.matrix.tensor for run in runs)

    Lender(tensors)(zeros, lambda _, values: values, note, absent=absent)
    assert sorted(written) == ([1] if dist.get_rank() == 0 else [0, 1])


@ranks(4)
def test_more_ranks_than_matrices_and_tensors_without_elements() -> None:
    mesh = init_device_mesh("cpu", (4,))
    originals = fulls((3, 2), (0, 4))
    tensors = [shard(full, mesh, [Shard(0)]) for full in originals]
    lend(tensors, whole_softmax)
    check(tensors[0], originals[0])


@ranks(2)
def test_bfloat16_travels_and_the_given_owner_computes() -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensors = [distribute_tensor(full.bfloat16(), mesh, [Shard(0)]) for full in fulls((4, 4), (4, 4))]

    def compute(matrices: Sequence[Matrix], values: list[Tensor]) -> list[Tensor]:
        assert dist.get_rank() == 1
        return [value + 1 for value in values]

    lend(tensors, compute, owners=[1, 1])
    assert torch.equal(tensors[0].full_tensor(), fulls((4, 4))[0].bfloat16() + 1)


def refusals(mesh: DeviceMesh) -> list[tuple[str, Callable[[], Any]]]:
    full = torch.zeros(4, 4)
    even = shard(full, mesh, [Shard(0)])
    return [
        ("expected torch.float32 like", lambda: lend([even, even.bfloat16()], whole_softmax)),
        ("expected a tensor on the mesh of", lambda: lend([even, full], whole_softmax)),
        (
            "compute returned 0 results for 2 matrices",
            lambda: Lender([full, full])(zeros, lambda *_: [], lambda *_: None),
        ),
        (r"compute returned shape \(1,\)", lambda: lend([full], lambda *_: [torch.zeros(1)])),
        (r"expected a rank in 0..0, got 3", lambda: lend([full], whole_softmax, owners=[3])),
        ("expected one rank for each of 1 matrices, got 0", lambda: lend([full], whole_softmax, owners=[])),
        ("expected at least 2 dimensions", lambda: lend([torch.zeros(3)], whole_softmax)),
        ("Partial|partial", lambda: lend([DTensor.from_local(full, mesh, [Partial()])], whole_softmax)),
        ("contiguous", lambda: lend([torch.zeros(4, 6).t()], whole_softmax)),
    ]


@ranks(2)
def test_what_does_not_go_together_is_refused() -> None:
    for message, act in refusals(init_device_mesh("cpu", (2,))):
        with pytest.raises(ValueError, match=message):
            act()


def test_plain_tensors_are_computed_where_they_are() -> None:
    (full,) = fulls((6, 4))
    tensor = full.clone()
    lend([tensor], whole_softmax)
    torch.testing.assert_close(tensor, expected(full))
    assert math.isfinite(tensor.sum())
