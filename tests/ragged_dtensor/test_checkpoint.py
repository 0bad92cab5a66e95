"""Checkpoints: what any cut wrote, any other cut, placement and world size reads."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ragged_oracle import held, numbered
from ranks import RankPool, ranks
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Partial, Placement, _StridedShard

from ragged_dtensor import RaggedShard, RaggedShardError, StridedRaggedShard, distribute_tensor

SHAPES: list[tuple[int, ...]] = [(12, 5), (2, 3, 2, 1, 2), (0, 3), ()]


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def ragged(shape: Sequence[int], units: Sequence[int]) -> Placement:
    """A flat cut with these shares, or one owner for a scalar."""
    if not shape:
        owner = max(range(len(units)), key=lambda rank: units[rank])
        return RaggedShard((), [int(rank == owner) for rank in range(len(units))])
    return RaggedShard(tuple(range(len(shape))), units)


UNITS = {1: [(1,)], 2: [(5, 7), (0, 1)], 3: [(1, 0, 2), (5, 1, 6)], 4: [(1, 4, 0, 7), (0, 0, 1, 0)]}


Layout = list[Placement]


def layouts(shape: Sequence[int]) -> list[Layout]:
    """Five of this world size that fit the shape, stock ones among them."""
    num_ranks, numel = dist.get_world_size(), torch.Size(shape).numel()
    units = [units for units in UNITS[num_ranks] if not shape or numel % sum(units) == 0] or [UNITS[num_ranks][-1]]
    dims = range(len(shape)) or [0]
    stock: list[Layout] = [[Replicate()], *([Shard(dim)] if shape else [Replicate()] for dim in (0, dims[-1]))]
    return [[ragged(shape, units[0])], [ragged(shape, units[-1])], *stock]


def state_of(placed: Callable[[tuple[int, ...], int], Layout], mesh: DeviceMesh, fill: bool) -> dict[str, DTensor]:
    """A tensor per shape and layout that it was saved in, placed as `placed` says."""
    return {
        f"{shape}/{index}": distribute_tensor(
            numbered(shape) if fill else torch.full(shape, -1.0), mesh, placed(shape, index)
        )
        for shape in SHAPES
        for index in range(5)
    }


def assert_holds_numbers(tensor: DTensor) -> None:
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    expected = held(numbered(tuple(tensor.shape)), tensor.placements, tuple(mesh.shape), coordinate)
    assert torch.equal(tensor.to_local(), expected)


def save_every_layout(root: str) -> None:
    state = state_of(lambda shape, index: layouts(shape)[index], mesh_of(), fill=True)
    dcp.save(state, checkpoint_id=f"{root}/{dist.get_world_size()}")


def load_every_layout(root: str) -> None:
    for folder, layout in itertools.product(sorted(Path(root).glob("*")), range(5)):
        state = state_of(lambda shape, _, layout=layout: layouts(shape)[layout], mesh_of(), fill=False)
        dcp.load(state, checkpoint_id=str(folder))
        for tensor in state.values():
            assert_holds_numbers(tensor)


def test_what_any_cut_and_world_wrote_any_other_reads(rank_pool: RankPool, tmp_path: Path) -> None:
    """A20: tensors of any placement, saved at 1 to 4 ranks, loaded at 1 to 4 ranks."""
    for num_ranks in [1, 2, 3, 4]:
        rank_pool.run(num_ranks, __file__, "save_every_layout", {"root": str(tmp_path)})
    for folder in tmp_path.iterdir():
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert {str(tuple(each.size)) for each in metadata.values()} == set(map(str, SHAPES))
    for num_ranks in [4, 3, 2, 1]:
        rank_pool.run(num_ranks, __file__, "load_every_layout", {"root": str(tmp_path)})


def two_axes() -> list[tuple[Placement, Placement]]:
    cut = RaggedShard((0,), (1, 3))
    return [
        (cut, Shard(1)),
        (StridedRaggedShard((0,), (1, 2), 2), Shard(0)),
        (Replicate(), RaggedShard((0, 1), (5, 7))),
        (RaggedShard((0, 1), (5, 7)), Replicate()),
        (cut, RaggedShard((0, 1), (1, 2))),
        (Shard(0), Shard(1)),
    ]


def save_two_axes(root: str) -> None:
    mesh = mesh_of(2, 2)
    state = {str(index): distribute_tensor(numbered((12, 5)), mesh, pair) for index, pair in enumerate(two_axes())}
    dcp.save(state, checkpoint_id=root)


def assert_loads(root: str, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    state = {str(i): distribute_tensor(torch.zeros(12, 5), mesh, placements) for i in range(len(two_axes()))}
    dcp.load(state, checkpoint_id=root)
    for tensor in state.values():
        assert_holds_numbers(tensor)


def load_two_axes(root: str) -> None:
    for placements in two_axes():
        assert_loads(root, mesh_of(2, 2), placements)


def load_one_axis(root: str) -> None:
    for placements in layouts((12, 5)):
        assert_loads(root, mesh_of(), placements)


def test_tensor_parallel_and_replicated_cuts_are_interchangeable(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(4, __file__, "save_two_axes", {"root": str(tmp_path)})
    rank_pool.run(4, __file__, "load_two_axes", {"root": str(tmp_path)})
    rank_pool.run(3, __file__, "load_one_axis", {"root": str(tmp_path)})


def tensor_parallel() -> list[tuple[Placement, Placement]]:
    """Every kind of ragged cut beside every placement of a tensor-parallel axis, for shape (12, 6)."""
    rows, flat = RaggedShard((0,), (1, 3)), RaggedShard((0, 1), (5, 7))
    strided = [StridedRaggedShard((0,), (1, 2), 2), StridedRaggedShard((0, 1), (5, 7), 2)]
    owned = StridedRaggedShard((0, 1), (0, 1), 2)
    return [
        *((cut, Replicate()) for cut in (rows, flat)),
        *((cut, Shard(0)) for cut in (*strided, owned)),
        (rows, Shard(1)),
        (RaggedShard((0,), (1, 0)), Shard(1)),
    ]


STOCK: list[tuple[Placement, ...]] = [(Replicate(),), (Shard(0),), (Shard(1),)]


def save_placed(root: str, mesh_shape: Sequence[int], many: list[tuple[Placement, ...]]) -> None:
    mesh = mesh_of(*mesh_shape)
    state = {str(i): distribute_tensor(numbered((12, 6)), mesh, each) for i, each in enumerate(many)}
    dcp.save({"weights": state}, checkpoint_id=root)


def load_placed(root: str, mesh_shape: Sequence[int], many: list[tuple[Placement, ...]], num_saved: int) -> None:
    mesh = mesh_of(*mesh_shape)
    for each in many:
        state = {str(i): distribute_tensor(torch.full((12, 6), -1.0), mesh, each) for i in range(num_saved)}
        dcp.load({"weights": state}, checkpoint_id=root)
        for tensor in state.values():
            assert_holds_numbers(tensor)


def test_tensor_parallel_ragged_shards_go_to_stock_placements_and_back(rank_pool: RankPool, tmp_path: Path) -> None:
    """A20 with a tensor-parallel axis: from and to a 2 x 2 mesh; Replicate, Shard(0) and Shard(1) on the other side."""
    tp, stock = str(tmp_path / "tp"), str(tmp_path / "stock")
    rank_pool.run(4, __file__, "save_placed", {"root": tp, "mesh_shape": (2, 2), "many": tensor_parallel()})
    rank_pool.run(3, __file__, "save_placed", {"root": stock, "mesh_shape": (3,), "many": STOCK})
    sizes = {tuple(e.size) for e in dcp.FileSystemReader(tp).read_metadata().state_dict_metadata.values()}
    assert sizes == {(12, 6)}
    for root, num_ranks, mesh_shape, many in [
        (tp, 2, (2,), STOCK),
        (tp, 3, (3,), STOCK),
        (tp, 4, (2, 2), tensor_parallel()),
        (stock, 4, (2, 2), tensor_parallel()),
    ]:
        num_saved = len(tensor_parallel() if root == tp else STOCK)
        task = {"root": root, "mesh_shape": mesh_shape, "many": many, "num_saved": num_saved}
        rank_pool.run(num_ranks, __file__, "load_placed", task)


def beside_strided_shards() -> list[tuple[Placement, ...]]:
    """Ragged cuts inside what torch's strided shards leave, for shape (12, 6): runs of rows, of columns, of both."""
    rows, flat = RaggedShard((0,), (1, 5)), RaggedShard((0, 1), (5, 13))
    return [
        (rows, _StridedShard(0, split_factor=3), Replicate()),
        (flat, _StridedShard(0, split_factor=2), Replicate()),
        (flat, _StridedShard(1, split_factor=3), Replicate()),
        (flat, Replicate(), _StridedShard(1, split_factor=1)),
        (RaggedShard((0, 1), (4, 5)), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3)),
        (RaggedShard((0, 1), (1, 0)), Shard(0), _StridedShard(0, split_factor=3)),
    ]


def save_beside_strided_shards(root: str) -> None:
    mesh = mesh_of(2, 2, 2)
    state = {}
    for i, placements in enumerate(beside_strided_shards()):
        x = distribute_tensor(numbered((12, 6)), mesh, placements)
        for chunk in x.__create_chunk_list__():
            box = x.__get_tensor_shard__(MetadataIndex("x", chunk.offsets))
            slices = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(box, numbered((12, 6))[slices]), placements
        state[str(i)] = x
    dcp.save({"weights": state}, checkpoint_id=root)


def load_beside_strided_shards(root: str, num_saved: int) -> None:
    mesh = mesh_of(2, 2, 2)
    for placements in beside_strided_shards():
        expected = distribute_tensor(numbered((12, 6)), mesh, placements).to_local()
        state = {str(i): distribute_tensor(torch.full((12, 6), -1.0), mesh, placements) for i in range(num_saved)}
        dcp.load({"weights": state}, checkpoint_id=root)
        assert all(torch.equal(tensor.to_local(), expected) for tensor in state.values()), placements


def test_cuts_beside_torchs_strided_shards_are_saved_and_loaded(rank_pool: RankPool, tmp_path: Path) -> None:
    """From and to 2 x 2 x 2 ranks; stock placements at 3 ranks on the other side."""
    strided, stock = str(tmp_path / "strided"), str(tmp_path / "stock")
    rank_pool.run(8, __file__, "save_beside_strided_shards", {"root": strided})
    rank_pool.run(3, __file__, "save_placed", {"root": stock, "mesh_shape": (3,), "many": STOCK})
    for root, num_saved in [(strided, len(beside_strided_shards())), (stock, len(STOCK))]:
        rank_pool.run(8, __file__, "load_beside_strided_shards", {"root": root, "num_saved": num_saved})
    task = {"root": strided, "mesh_shape": (3,), "many": STOCK, "num_saved": len(beside_strided_shards())}
    rank_pool.run(3, __file__, "load_placed", task)


def save_idle_rank(root: str) -> None:
    state = {"x": distribute_tensor(numbered((10, 4)), mesh_of(), [RaggedShard((0, 1), (2, 3, 0, 5))])}
    dcp.save(state, checkpoint_id=root)


def load_idle_rank(root: str) -> None:
    for placement in (Replicate(), Shard(0), Shard(1), RaggedShard((0,), (7, 3)), RaggedShard((0, 1), (0, 1))):
        state = {"x": distribute_tensor(torch.zeros(10, 4), mesh_of(), [placement])}
        dcp.load(state, checkpoint_id=root)
        assert_holds_numbers(state["x"])


def test_a_flat_cut_with_an_idle_rank_is_saved_and_loaded(rank_pool: RankPool, tmp_path: Path) -> None:
    """C11: dims (0, 1), units (2, 3, 0, 5), shape (10, 4)."""
    rank_pool.run(4, __file__, "save_idle_rank", {"root": str(tmp_path)})
    rank_pool.run(2, __file__, "load_idle_rank", {"root": str(tmp_path)})


@ranks(2)
def test_a_cut_inside_a_row_is_written_as_the_boxes_of_the_drawing() -> None:
    """A22: DCP never takes a ragged shard for the whole tensor, which its default answers do."""
    x = distribute_tensor(numbered((3, 4)), mesh_of(), [RaggedShard((0, 1), (5, 7))])
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in x.__create_chunk_list__()]
    drawn = [[((0, 0), (1, 4)), ((1, 0), (1, 1))], [((1, 1), (1, 3)), ((2, 0), (1, 4))]]
    assert chunks == drawn[dist.get_rank()]
    for (offsets, sizes), item in zip(chunks, x.__create_write_items__("x", x), strict=True):
        assert item.tensor_data.size == (3, 4)
        box = x.__get_tensor_shard__(MetadataIndex("x", offsets))
        slices = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        assert torch.equal(box, numbered((3, 4))[slices])
        assert box.untyped_storage().nbytes() == box.nbytes  # else DCP copies it before writing
        before = x.to_local().sum()
        box += 1
        assert x.to_local().sum() == before + box.numel()


@ranks(4)
def test_boxes_cover_every_element_once_and_number_at_most_twice_the_dims() -> None:
    for shape in [(24,), (12, 5), (6, 4, 2), (2, 3, 2, 1, 2)]:
        for units in itertools.product(range(3), repeat=4):
            if not sum(units) or torch.Size(shape).numel() % (sum(units) // max(1, math.gcd(*units))):
                continue
            x = distribute_tensor(numbered(shape), mesh_of(), [ragged(shape, units)], src_data_rank=None)
            seen = torch.zeros(shape)
            chunks = x.__create_chunk_list__()
            for chunk in chunks:
                seen[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            assert len(chunks) <= 2 * len(shape) - 1
            assert seen.sum() == x.to_local().numel()
            assert torch.equal(numbered(shape)[seen.bool()], x.to_local().flatten())


@ranks(4)
def test_replicas_write_once_and_planning_communicates_nothing() -> None:
    mesh = mesh_of(2, 2)
    x = distribute_tensor(numbered((12, 5)), mesh, [Replicate(), RaggedShard((0, 1), (5, 7))])
    planner = DefaultSavePlanner()
    planner.set_up_planner({"x": x}, None, dist.get_rank() == 0)
    plans: list[object] = [None] * 4
    with CommDebugMode() as comms:
        plan = planner.create_local_plan()
    assert comms.get_total_counts() == 0
    dist.all_gather_object(plans, plan)
    final, metadata = planner.create_global_plan(plans)
    written = [item.index for plan in final for item in plan.items]
    assert len(written) == len(set(written)) == len(metadata.state_dict_metadata["x"].chunks)
    assert metadata.state_dict_metadata["x"].size == (12, 5)


@ranks(2)
def test_partial_tensors_and_unknown_boxes_are_refused() -> None:
    mesh, cut = mesh_of(1, 2), RaggedShard((0,), (1, 1))
    x = distribute_tensor(numbered((4, 2)), mesh, [Replicate(), cut])
    partial = DTensor.from_local(x.to_local(), mesh, [Partial(), cut], shape=torch.Size((4, 2)), stride=(2, 1))
    with pytest.raises(RaggedShardError, match=r"w: placed as .* still to be reduced"):
        partial.__create_write_items__("w", partial)
    with pytest.raises(RaggedShardError, match=r"no box at torch.Size\(\[9, 9\]\)"):
        x.__get_tensor_shard__(MetadataIndex("w", (9, 9)))


# --- models and optimizers


def model_of(mesh: DeviceMesh, units: Sequence[int], seed: int) -> nn.Module:
    """Linear(3, 5) and Linear(5, 1), all parameters cut flat where the units allow it, else on the last rank."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            flat = tuple(range(parameter.ndim))
            fits = parameter.numel() % sum(units) == 0
            shares = units if fits else [int(rank == len(units) - 1) for rank in range(len(units))]
            sharded = distribute_tensor(parameter.detach(), mesh, [RaggedShard(flat, shares)])
            layer.register_parameter(name, nn.Parameter(sharded))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = (parameter * (step + 1)).sin().detach()
        optimizer.step()


def save_trained(root: str, units: Sequence[int]) -> None:
    model = model_of(mesh_of(), units, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    states, optimizers = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": optimizers}, checkpoint_id=root)


def resume_and_compare(root: str, units: Sequence[int]) -> None:
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    expected_optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    train(reference, expected_optimizer, 2)
    model = model_of(mesh_of(), units, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states, optimizers = get_state_dict(model, optimizer)
    dcp.load({"model": states, "optimizer": optimizers}, checkpoint_id=root)
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=optimizers)
    assert_same(model, optimizer, reference, expected_optimizer)
    train(model, optimizer, 1)
    train(reference, expected_optimizer, 1)
    assert_same(model, optimizer, reference, expected_optimizer)


def assert_same(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reference: nn.Module,
    expected: torch.optim.Optimizer,
) -> None:
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)  # type: ignore[attr-defined]
        for key, value in expected.state[theirs].items():
            found = optimizer.state[ours][key]
            assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, value), key


def resume_each(root: str, units: Sequence[int]) -> None:
    for folder in sorted(Path(root).iterdir()):
        resume_and_compare(str(folder), units)


def test_training_resumes_at_another_world_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """C43. A20: parameters and AdamW's state, saved at 1 to 4 ranks and loaded at 1 to 4 ranks, bit by bit."""
    for saved in [(1,), (3, 2), (2, 1, 2), (1, 0, 1, 3)]:
        root = str(tmp_path / str(len(saved)))
        rank_pool.run(len(saved), __file__, "save_trained", {"root": root, "units": saved})
    for loaded in [(1, 4, 0, 0), (1, 0, 4), (2, 3), (1,)]:
        rank_pool.run(len(loaded), __file__, "resume_each", {"root": str(tmp_path), "units": loaded})


@ranks(3)
def test_full_state_dicts_from_rank_0_or_from_every_rank_are_sliced() -> None:
    units = (1, 0, 4)
    source = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    source_optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    train(source, source_optimizer, 2)
    states, optimizers = get_model_state_dict(source), get_optimizer_state_dict(source, source_optimizer)
    for from_rank_0 in [True, False]:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        model = model_of(mesh_of(), units, seed=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        given = dist.get_rank() == 0 or not from_rank_0
        set_model_state_dict(model, copy.deepcopy(states) if given else {}, options=options)
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(optimizers) if given else {}, options=options)
        assert_same(model, optimizer, source, source_optimizer)
        found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for key, value in states.items():
            assert torch.equal(found[key], value)


Params = Iterable[nn.Parameter]


def adamw(params: Params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, amsgrad=True)


def sgd(params: Params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@ranks(3)
@pytest.mark.parametrize("make", [adamw, sgd, torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizers_state_dict_of_one_process_is_sliced(make: Callable[[Params], torch.optim.Optimizer]) -> None:
    source = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    theirs = make(source.parameters())
    train(source, theirs, 2)
    model = model_of(mesh_of(), (1, 0, 4), seed=2)
    model.load_state_dict({key: distribute_like(model, key, value) for key, value in source.state_dict().items()})
    optimizer = make(model.parameters())
    with CommDebugMode() as comms:
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert comms.get_total_counts() == 0
    assert_same(model, optimizer, source, theirs)
    train(model, optimizer, 1)
    train(source, theirs, 1)
    assert_same(model, optimizer, source, theirs)


def distribute_like(model: nn.Module, key: str, value: torch.Tensor) -> DTensor:
    param = model.get_parameter(key)
    return distribute_tensor(value, param.device_mesh, param.placements)  # type: ignore[attr-defined]


@ranks(2)
def test_state_of_another_shape_is_refused_at_loading_by_name() -> None:
    source = nn.Linear(4, 3)
    theirs = torch.optim.AdamW(source.parameters())
    train(source, theirs, 1)
    model = model_of(mesh_of(), (1, 2), seed=1)[0]
    optimizer = torch.optim.AdamW(model.named_parameters())
    with pytest.raises(RaggedShardError, match=r"exp_avg of parameter 0: expected .* shape \(5, 3\).*\(3, 4\)"):
        optimizer.load_state_dict(theirs.state_dict())
    theirs = torch.optim.AdamW(source.named_parameters())
    train(source, theirs, 1)
    with pytest.raises(RaggedShardError, match=r"exp_avg of parameter weight: expected the parameter's shape \(5, 3\)"):
        optimizer.load_state_dict(theirs.state_dict())


@ranks(2)
def test_full_state_from_rank_0_fills_parameters_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = model_of_meta(mesh_of())
    states = {"weight": numbered((6, 4)), "bias": numbered((6,))} if dist.get_rank() == 0 else {}
    set_model_state_dict(model, states, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert torch.equal(model.weight.full_tensor(), numbered((6, 4)))
    assert torch.equal(model.bias.full_tensor(), numbered((6,)))


def model_of_meta(mesh: DeviceMesh) -> nn.Linear:
    model = nn.Linear(4, 6, device="meta")
    for name, parameter in list(model.named_parameters()):
        cut = RaggedShard(tuple(range(parameter.ndim)), (1, 2))
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [cut])))
    return model


# --- files of one rank


@ranks(2)
def test_a_ragged_tensor_survives_pickle_deepcopy_and_a_weights_only_load() -> None:
    """A22: pickle, and torch.save with a weights_only load, keep values and placements."""
    x = distribute_tensor(numbered((6, 4)), mesh_of(), [RaggedShard((0, 1), (5, 7))])
    buffer = io.BytesIO()
    torch.save({"x": x, "full": x.full_tensor()}, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for twin in [pickle.loads(pickle.dumps(x)), copy.deepcopy(x), loaded["x"]]:
        assert twin.placements == x.placements
        assert torch.equal(twin.to_local(), x.to_local())
        assert torch.equal(twin.full_tensor(), numbered((6, 4)))
    assert torch.equal(loaded["full"], numbered((6, 4)))


@ranks(2)
def test_a_shard_that_begins_inside_a_buffer_is_copied_and_pickled_like_any_other() -> None:
    whole = distribute_tensor(numbered((6, 4)), mesh_of(), [RaggedShard((0, 1), (5, 7))])
    local = torch.cat([torch.zeros(3), whole.to_local()])[3:]
    x = DTensor.from_local(
        local, mesh_of(), whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    file = io.BytesIO()
    torch.save(x, file)
    twins = [
        pickle.loads(pickle.dumps(x)),
        copy.deepcopy(x),
        torch.load(io.BytesIO(file.getvalue()), weights_only=True),
    ]
    local.zero_()
    for twin in twins:
        assert twin.placements == x.placements
        assert torch.equal(twin.full_tensor(), numbered((6, 4)))


@ranks(2)
def test_parameters_and_modules_can_be_deepcopied_and_averaged() -> None:
    model = model_of(mesh_of(), (2, 3), seed=1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    average = torch.optim.swa_utils.AveragedModel(twin, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)
    average.update_parameters(model)
    expected = model_of(mesh_of(), (2, 3), seed=1)
    for ours, new, old in zip(average.module.parameters(), model.parameters(), expected.parameters(), strict=True):
        ema = torch.lerp(new.full_tensor(), new.full_tensor(), 0.1)  # type: ignore[attr-defined]
        assert not torch.equal(new.full_tensor(), old.full_tensor())  # type: ignore[attr-defined]
        assert torch.allclose(ours.full_tensor(), ema)  # type: ignore[attr-defined]
