"""Elementwise ops: each rank works on its own elements, and the result is that of the unsharded op."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged_oracle import held
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Partial, Placement

from ragged_dtensor import (
    RaggedShard,
    RaggedShardError,
    StridedRaggedShard,
    UnsupportedOpError,
    distribute_tensor,
)
from ragged_dtensor.seams import seams

ROWS = RaggedShard((0,), (1, 2))
FLAT = RaggedShard((0, 1), (5, 7))
OWNER = RaggedShard((0, 1), (0, 1))


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def place(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """The rank's part of `expected`, bit by bit and of the same dtype, without a collective."""
    assert isinstance(result, DTensor)
    mesh, coordinate = result.device_mesh, result.device_mesh.get_coordinate()
    assert coordinate is not None
    assert result.dtype == result.to_local().dtype == expected.dtype
    assert result.shape == expected.shape
    part = held(expected, result.placements, tuple(mesh.shape), coordinate)
    torch.testing.assert_close(result.to_local(), part, rtol=0, atol=0, equal_nan=True)


# --- operands


@ranks(2)
def test_operands_of_one_cut_numbers_and_scalars_need_no_communication() -> None:
    mesh, full, other = mesh_of(), torch.randn(6, 4), torch.rand(6, 4) + 0.5
    scalar = torch.tensor(1.5)
    whole_scalar = place(scalar, mesh, Replicate())
    for cut in [ROWS, FLAT, OWNER]:
        x, y = place(full, mesh, cut), place(other, mesh, cut)
        with CommDebugMode() as comms:
            assert_same(x + y, full + other)
            assert_same(2.5 / y, 2.5 / other)
            assert_same(x * scalar, full * scalar)
            assert_same(x * whole_scalar, full * scalar)
            assert_same(torch.where(x > 0, x, y), torch.where(full > 0, full, other))
            assert_same(torch.addcdiv(x, y, y, value=0.5), torch.addcdiv(full, other, other, value=0.5))
            assert_same(x.clamp(y - 1, y), full.clamp(other - 1, other))
            assert_same(torch.nan_to_num(x.log()), torch.nan_to_num(full.log()))
            assert_same(x.to(torch.bfloat16), full.to(torch.bfloat16))
            assert_same(x.masked_fill(y > 1, 0.0), full.masked_fill(other > 1, 0.0))
            assert_same(x.masked_fill(y > 1, scalar), full.masked_fill(other > 1, scalar))
            assert_same(x.clone().masked_fill_(y > 1, whole_scalar), full.masked_fill(other > 1, scalar))
        assert comms.get_total_counts() == 0


@ranks(2)
def test_whole_operands_broadcast_or_are_sliced_without_communication() -> None:
    mesh, full, other = mesh_of(), torch.randn(6, 4), torch.rand(6, 4)
    for cut in [ROWS, FLAT, OWNER]:
        x = place(full, mesh, cut)
        for operand in [other, other[0], other[:1], other[:, :1], other[:1, :1], other[0, 0].reshape(1)]:
            whole = place(operand, mesh, Replicate())
            with CommDebugMode() as comms:
                assert_same(x * whole, full * operand)
                assert_same(whole - x, operand - full)
                assert_same(x.clone().add_(whole), full + operand)
                assert (x * whole).placements == (cut,)
            assert comms.get_total_counts() == 0


@ranks(2)
def test_a_column_cut_alike_broadcasts_over_its_rows() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    x = place(full, mesh, ROWS)
    assert_same(x / place(full[:, :1], mesh, ROWS), full / full[:, :1])
    assert_same(place(full[:, :1], mesh, ROWS) * place(full[:1], mesh, Replicate()), full[:, :1] * full[:1])


@ranks(2)
def test_rows_and_the_flat_cut_between_the_same_rows_are_one_cut() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    rows, flat = place(full, mesh, ROWS), place(full, mesh, RaggedShard((0, 1), (1, 2)))
    with CommDebugMode() as comms:
        assert_same(rows + flat, full + full)
        assert_same(flat + rows, full + full)
        assert_same(rows.clone().mul_(flat), full * full)
    assert comms.get_total_counts() == 0


@ranks(2)
def test_a_different_cut_raises_with_the_call_that_makes_them_agree() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    x = place(full, mesh, ROWS)
    for other in [FLAT, OWNER, Shard(0), Shard(1)]:
        y = place(full, mesh, other)
        with pytest.raises(RaggedShardError, match="cut differently") as raised:
            torch.add(x, y)
        assert f"y.redistribute(placements=[{ROWS!r}])" in str(raised.value)
        placements = eval(str(raised.value).rpartition("placements=")[2].removesuffix(")."))
        assert_same(x + y.redistribute(placements=placements), full + full)
    with pytest.raises(RaggedShardError, match="writes a result of shape"):
        place(full, mesh, Replicate()).add_(x)
    with pytest.raises(RaggedShardError, match=r"y.redistribute\(placements=\[Replicate\(\)\]"):
        torch.add(place(full[:1], mesh, RaggedShard((0,), (0, 1))), x)


@ranks(4)
def test_operands_on_two_meshes_raise() -> None:
    first, second = mesh_of(4), mesh_of(2, 2)
    x = place(torch.randn(6, 4), first, RaggedShard((0, 1), (1, 4, 0, 7)))
    y = place(torch.randn(6, 4), second, Replicate(), ROWS)
    with pytest.raises(RaggedShardError, match="operands on two meshes"):
        torch.add(x, y)


@ranks(4)
def test_two_mesh_axes_keep_both_placements() -> None:
    mesh, full, other = mesh_of(2, 2), torch.randn(12, 6), torch.rand(12, 6)
    for placements in [
        (ROWS, Shard(1)),
        (StridedRaggedShard((0,), (1, 2), 2), Shard(0)),
        (Replicate(), FLAT),
        (ROWS, Replicate()),
        (ROWS, RaggedShard((0, 1), (1, 2))),
    ]:
        x, y = place(full, mesh, *placements), place(other, mesh, *placements)
        assert_same(x * y + 1, full * other + 1)
        for operand in [other, other[0], other[:, :1]]:
            whole = place(operand, mesh, Replicate(), Replicate())
            assert_same(x + whole, full + operand)
            assert (x + whole).placements == placements
    x = place(full, mesh, ROWS, Shard(1))
    assert_same(x * place(other[0], mesh, Replicate(), Shard(0)), full * other[0])


@ranks(2)
def test_values_still_to_be_reduced_take_linear_ops_only() -> None:
    mesh = mesh_of(1, 2)
    local = place(torch.randn(6, 4), mesh, Replicate(), ROWS).to_local()
    shape, stride = torch.Size((6, 4)), (4, 1)
    x = DTensor.from_local(local, mesh, [Partial(), ROWS], shape=shape, stride=stride)
    for result, expected in [
        (x + x, local + local),
        (x * 2, local * 2),
        (-x, -local),
        (x.clone(), local),
        (x.detach(), local),
    ]:
        assert result.placements == (Partial(), ROWS)
        assert torch.equal(result.to_local(), expected)
    whole = place(torch.randn(6, 4), mesh, Replicate(), ROWS)
    for op in [lambda: x + 1, lambda: x * x, lambda: x.exp(), lambda: x > 0, lambda: x * whole, lambda: x + whole]:
        with pytest.raises(RaggedShardError, match=r"still to be reduced|cut differently"):
            op()


# --- results


@ranks(2)
def test_numbers_decide_the_dtype_also_when_an_answer_is_remembered() -> None:
    mesh, full = mesh_of(), torch.arange(24).reshape(6, 4)
    for cut in [ROWS, OWNER]:
        x = place(full, mesh, cut)
        for _ in range(2):
            for number in [2, 2.0, 2.5, True]:
                assert_same(x * number, full * number)
                assert_same(x**number, full**number)
                assert_same(torch.clamp(x, max=number), torch.clamp(full, max=number))
                assert_same(torch.floor_divide(x, number), torch.floor_divide(full, number))
                assert_same(torch.full_like(x, number), torch.full_like(full, number))
                assert_same(
                    torch.full_like(x, number, dtype=torch.float64), torch.full_like(full, number, dtype=torch.float64)
                )
                assert_same(torch.where(x > 3, x, number), torch.where(full > 3, full, number))


@ranks(2)
def test_out_and_in_place_write_into_tensors_of_the_same_cut() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    for cut in [ROWS, FLAT, OWNER]:
        x, out = place(full, mesh, cut), place(torch.zeros(6, 4), mesh, cut)
        pointer = out.to_local().data_ptr()
        assert torch.add(x, 1, out=out) is out
        assert_same(out, full + 1)
        assert out.mul_(2).copy_(x).fill_(3).zero_().add_(x) is out
        assert_same(out, full)
        assert out.to_local().data_ptr() == pointer
        mantissa, exponent = torch.frexp(x)
        assert_same(mantissa, torch.frexp(full)[0])
        assert_same(exponent, torch.frexp(full)[1])
    with pytest.raises(RaggedShardError, match="writes a result of shape"):
        torch.add(place(full, mesh, ROWS), 1, out=place(full, mesh, FLAT))
    with pytest.raises(RaggedShardError, match="writes a result of shape"):
        torch.ops.aten.clone.out(place(full, mesh, ROWS), out=place(full, mesh, FLAT))


@ranks(2)
def test_new_tensors_of_the_same_shape_are_cut_alike_and_others_are_whole() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    for cut in [ROWS, FLAT, OWNER]:
        x = place(full, mesh, cut)
        for make in [
            torch.zeros_like,
            torch.ones_like,
            lambda t: torch.full_like(t, 3.0),
            lambda t: torch.zeros_like(t, dtype=torch.int32),
            lambda t: t.new_zeros(6, 4),
            lambda t: t.new_ones((6, 4), dtype=torch.float64),
            lambda t: t.new_full((6, 4), 5.0),
        ]:
            assert_same(make(x), make(full))
            assert make(x).placements == (cut,)
        for empty in [torch.empty_like(x), x.new_empty(6, 4), x.new_empty_strided((6, 4), (4, 1))]:
            assert empty.to_local().shape == x.to_local().shape
        assert x.new_zeros(3).placements == (Replicate(),)
        assert_same(x.new_full((2, 2), 4.0), full.new_full((2, 2), 4.0))


@ranks(2)
def test_scalars_have_one_owner_and_promote_like_scalars() -> None:
    mesh, full = mesh_of(), torch.tensor(1.5)
    x = place(full, mesh, RaggedShard((), (0, 1)))
    assert_same(x + x, full + full)
    assert_same(x * 2, full * 2)
    assert_same(x * torch.tensor(2.0, dtype=torch.float64), full * torch.tensor(2.0, dtype=torch.float64))
    assert_same(x.add_(1), full.add_(1))
    assert_same(x > 1, full > 1)
    assert_same(torch.zeros_like(x), torch.zeros_like(full))
    with pytest.raises(RaggedShardError, match=r"y.redistribute\(placements=\[Replicate\(\)\]"):
        torch.add(x, place(torch.ones(3), mesh, Shard(0)))


@ranks(2, 3)
def test_tensors_without_elements_stay_without() -> None:
    mesh, num_ranks = mesh_of(), dist.get_world_size()
    for shape in [(0, 4), (4, 0), (0,)]:
        full = torch.zeros(shape)
        x = place(full, mesh, RaggedShard((0,), (1,) + (0,) * (num_ranks - 1)))
        assert_same((x + 1).sin() * x, (full + 1).sin() * full)
        assert_same(torch._foreach_add([x], 1)[0], full + 1)


@ranks(1)
def test_one_rank_holds_everything() -> None:
    mesh, full = mesh_of(), torch.randn(6, 4)
    for cut in [RaggedShard((0,), (3,)), RaggedShard((0, 1), (1,))]:
        x = place(full, mesh, cut)
        assert_same((x * 2 + x.exp()).to(torch.float64), (full * 2 + full.exp()).to(torch.float64))


@ranks(2)
def test_shifts_that_torch_silently_drops_raise() -> None:
    x = place(torch.arange(24).reshape(6, 4), mesh_of(), ROWS)
    for shift in [lambda: x << 1, lambda: x >> 1]:
        with pytest.raises(UnsupportedOpError, match=r"__[lr]shift__"):
            shift()
    assert_same(torch.bitwise_left_shift(x, 1), torch.arange(24).reshape(6, 4) << 1)


@ranks(2)
def test_memory_formats_other_than_contiguous_raise() -> None:
    x = place(torch.rand(2, 3, 2, 2), mesh_of(), RaggedShard((0, 1), (1, 2)))
    for op in [lambda: x.clone(memory_format=torch.channels_last), lambda: x.to(memory_format=torch.channels_last)]:
        with pytest.raises(UnsupportedOpError, match="channels_last"):
            op()


# --- lists


@ranks(2)
def test_lists_may_mix_cuts_shapes_and_placements() -> None:
    mesh = mesh_of()
    placements: list[Placement] = [ROWS, FLAT, OWNER, Replicate(), Shard(0), RaggedShard((), (1, 0))]
    fulls = [torch.rand(6, 4), torch.rand(6, 4), torch.rand(6, 4), torch.rand(3), torch.rand(4, 2), torch.rand(())]

    def check(op: Callable[[list[torch.Tensor]], Sequence[torch.Tensor] | None]) -> None:
        ours, theirs = [place(f, mesh, p) for f, p in zip(fulls, placements, strict=True)], [f.clone() for f in fulls]
        results, expected = op(ours) or ours, op(theirs) or theirs
        for result, want in zip(results, expected, strict=True):
            assert_same(result, want)

    check(lambda xs: torch._foreach_add(xs, 2.0))
    check(lambda xs: torch._foreach_mul(xs, xs))
    check(lambda xs: torch._foreach_add_(xs, xs, alpha=0.5))
    check(lambda xs: torch._foreach_sqrt_(xs))
    check(lambda xs: torch._foreach_lerp_(xs, [x + 1 for x in xs], 0.25))
    check(lambda xs: torch._foreach_addcdiv_(xs, xs, [x + 1 for x in xs], [float(i) for i in range(len(xs))]))
    check(lambda xs: torch._foreach_mul_(xs, torch.tensor(0.5)))
    check(lambda xs: torch._foreach_zero_(xs))
    check(lambda xs: torch._foreach_copy_(xs, [x + 1 for x in xs]))


@ranks(2)
def test_lists_slice_whole_tensors_and_refuse_other_cuts() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    xs = [place(full, mesh, ROWS), place(full, mesh, FLAT)]
    whole = [place(full, mesh, Replicate()) for _ in xs]
    for result in torch._foreach_mul(xs, whole):
        assert_same(result, full * full)
    with pytest.raises(RaggedShardError, match=r"cut differently: argument 1\[1\]"):
        torch._foreach_add_(xs, [place(full, mesh, ROWS), place(full, mesh, ROWS)])
    with pytest.raises(RaggedShardError, match="would change its placement"):
        torch._foreach_add_(whole, xs)


# --- cost and chains


@ranks(2)
def test_a_repeated_elementwise_op_never_reaches_python() -> None:
    mesh, full = mesh_of(), torch.rand(6, 4)
    xs = [place(full, mesh, cut) for cut in [ROWS, FLAT]]
    ops: list[Callable[[], object]] = [
        lambda: xs[0] + xs[0],
        lambda: xs[1] * 2,
        lambda: xs[0].mul_(0.5),
        lambda: torch.zeros_like(xs[1]),
        lambda: xs[0].detach(),
    ]
    if not torch.__version__.startswith("2.11."):  # which asks Python for every list
        ops += [lambda: torch._foreach_add(xs, xs), lambda: torch._foreach_mul_(xs, 0.5)]
    for op in ops:
        op()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seams, "answer", lambda op, *_: pytest.fail(f"{op} was asked again"))
        for op in ops:
            op()


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
OPS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda x, y: x + y,
    lambda x, y: x * 2 - y,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.sin().mul_(y),
    lambda x, y: torch.lerp(x, y, 0.25),
    lambda x, y: (x == y).to(x.dtype),
    lambda x, y: x.neg().clamp_(min=-1),
    lambda x, y: torch._foreach_maximum([x], [y])[0],
    lambda x, y: x.abs().sqrt() + torch.zeros_like(y),
]


@ranks(3)
def test_any_chain_of_ops_on_any_cut_equals_the_unsharded_one() -> None:
    mesh = mesh_of()

    # Without a database and randomness every rank draws the same examples.
    @settings(derandomize=True, database=None, max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def chains(data: st.DataObject) -> None:
        shape = data.draw(SHAPES)
        dims = tuple(range(data.draw(st.integers(1, len(shape)))))
        rows = torch.Size(shape[: len(dims)]).numel()
        first, second = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
        units = (first, second - first, rows - second)
        full, other = torch.randn(shape), torch.randn(shape)
        x, y = place(full, mesh, RaggedShard(dims, units)), place(other, mesh, RaggedShard(dims, units))
        for op in data.draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=4)):
            x, full = op(x, y), op(full, other)
        assert_same(x, full)

    chains()
