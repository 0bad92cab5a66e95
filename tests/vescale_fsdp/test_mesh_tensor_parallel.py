"""Parameters that tensor parallelism made DTensors: sharded inside what it left, on one mesh of both, and exact."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import ranks
from small_models import Tower, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_dtensor import RaggedShard, StridedRaggedShard
from vescale_fsdp import (
    CheckpointError,
    MixedPrecisionPolicy,
    ParamPolicy,
    VescaleError,
    fully_shard,
    iterate_tensors,
    load,
    report,
    save,
    to_fsdp2,
)
from vescale_fsdp.preflight import DivergenceError


def meshes(shape: tuple[int, ...]) -> tuple[DeviceMesh, DeviceMesh]:
    """Data mesh and tp mesh of a root of (dp, tp) or (rep, dp, tp)."""
    names = ("rep", "dp", "tp")[-len(shape) :]
    root = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return root[names[:-1]], root["tp"]


def parallelize(model: Tower, tp: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})


def data_rank(data: DeviceMesh) -> tuple[int, int]:
    """How many ranks have data of their own, and this rank's number among them."""
    number = 0
    for size, at in zip(data.shape, data.get_coordinate() or (), strict=True):
        number = number * size + at
    return data.size(), number


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(model: nn.Module, data: DeviceMesh | None, sizes: tuple[int, int], steps: int = 3) -> list[float]:
    optim = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    num_ranks, rank = sizes
    losses = []
    for step in range(steps):
        x = batch(step, num_ranks, None if data is None else rank).double()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        total = loss.detach().clone()
        if data is not None:
            for axis in range(data.ndim):
                dist.all_reduce(total, dist.ReduceOp.AVG, group=data.get_group(axis))
        losses.append(total.item())
    return losses


@pytest.mark.parametrize("hidden", [16, 5, 7])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@ranks(4)
def test_tensor_parallel_training_equals_one_process_and_fsdp2(shape: tuple[int, ...], hidden: int) -> None:
    data, tp = meshes(shape)
    reference = Tower(hidden=hidden).double()
    expected = train(copy.deepcopy(reference), None, (data.size(), 0))
    losses = []
    for shard in (fully_shard, torch_fully_shard):
        model: Any = copy.deepcopy(reference)
        parallelize(model, tp)
        for block in model.blocks:
            shard(block, mesh=data)
        shard(model, mesh=data)
        losses.append(train(model, data, data_rank(data)))
        if shard is fully_shard:
            ours = model
    assert losses[0] == pytest.approx(expected, rel=1e-9)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    trained = copy.deepcopy(reference)
    train(trained, None, (data.size(), 0))
    for mine, theirs in zip(ours.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs.detach(), rtol=1e-8, atol=1e-9)


class Weights(nn.Module):
    """Parameters that are wrapped, gathered and looked at."""

    def __init__(self, **weights: torch.Tensor) -> None:
        super().__init__()
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight))

    def forward(self) -> torch.Tensor:
        return torch.stack([full(param).square().sum() for param in self.parameters()]).sum()


@pytest.mark.parametrize("rows", [5, 6, 7, 9, 1, 2, 3])
@ranks(4)
def test_full_tensors_are_exact_whatever_tensor_parallelism_cut(rows: int) -> None:
    data, tp = meshes((2, 2))
    whole = torch.arange(rows * 3.0).view(rows, 3)
    wide = torch.arange(4.0 * rows).view(4, rows)
    placed = {
        "rows": distribute_tensor(whole, tp, [Shard(0)]),
        "columns": distribute_tensor(wide, tp, [Shard(1)]),
        "last": distribute_tensor(wide, tp, [Shard(-1)]),
        "same": distribute_tensor(whole, tp, [Replicate()]),
        "vector": distribute_tensor(torch.arange(float(rows)), tp, [Shard(0)]),
    }
    expected = {name: tensor.full_tensor() for name, tensor in placed.items()}
    locals_ = {name: tensor.to_local().clone() for name, tensor in placed.items()}
    model: Any = Weights(**placed)
    fully_shard(model, mesh=data)
    for name, param in model.named_parameters():
        assert param.device_mesh.mesh_dim_names == ("dp", "tp")
        assert isinstance(param.placements[0], RaggedShard)
        assert isinstance(param.placements[0], StridedRaggedShard) == (name in ("rows", "vector"))
        assert param.placements[1] == placed[name].placements[0]
        assert torch.equal(param.full_tensor(), expected[name])
    model.unshard()
    for name, param in model.named_parameters():
        assert param.placements == placed[name].placements
        assert torch.equal(param.to_local(), locals_[name])
    model.reshard()
    model.load_state_dict({name: tensor + 1 for name, tensor in expected.items()})
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[name] + 1)


@ranks(4)
def test_cuts_lie_between_rows_of_the_part_that_another_axis_left() -> None:
    """Six elements of a row are on each tensor parallel rank; a format's blocks and the row combine."""
    data, tp = meshes((2, 2))
    model: Any = Weights(w=distribute_tensor(torch.randn(5, 12), tp, [Shard(1)]))
    fully_shard(model, mesh=data, param_policy=lambda fqn, param: ParamPolicy(granularity="rows:2"))
    spec = report(model).groups[0].plan.specs[0]
    assert spec.shape == (5, 6)
    assert spec.granularity.numel == 12
    assert len(spec.granularity.reasons) == 2
    assert model.w.placements[0].dims == (0,)


@ranks(4)
def test_a_part_of_five_rows_over_two_shards_keeps_its_size_and_stays_frozen() -> None:
    data, tp = meshes((2, 2))
    model: Any = Weights(w=distribute_tensor(torch.randn(10, 8), tp, [Shard(0)]), other=torch.randn(3))
    model.w.requires_grad_(False)
    model.w.note = "kept"
    fully_shard(model, mesh=data)
    assert not model.w.requires_grad
    assert model.w.note == "kept"
    rows: list[Any] = [None] * 2
    dist.all_gather_object(rows, model.w.to_local().numel() / 8, group=data.get_group())
    assert sum(rows) == 5
    model.unshard()
    assert model.w.to_local().shape == (5, 8)
    assert not model.w.requires_grad


@ranks(4)
def test_sequence_parallel_norms_train_like_one_process() -> None:
    data, tp = meshes((2, 2))
    reference = Tower(depth=1).double()
    model = copy.deepcopy(reference)
    block = model.blocks[0]
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    parallelize_module(block, tp, plan)
    parallelize_module(
        model, tp, {"blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))}
    )
    parallelize_module(model, tp, {"head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())})
    fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)
    losses = train(model, data, data_rank(data))
    assert losses == pytest.approx(train(reference, None, (2, 0)), rel=1e-9)
    assert block.norm.weight.placements[1] == Replicate()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine), theirs.detach(), rtol=1e-8, atol=1e-9)


@ranks(4)
def test_a_gradient_that_tensor_parallel_ranks_sum_is_summed_once_in_the_dtype_of_the_reduction() -> None:
    """256 + 1 is no bfloat16: summed in the compute dtype, the one would be lost."""
    data, tp = meshes((2, 2))
    model: Any = Weights(scale=distribute_tensor(torch.ones(4), tp, [Replicate()]))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=data, mp_policy=policy)
    rows = DTensor.from_local(torch.full((1, 4), 256.0 if tp.get_local_rank() == 0 else 1.0).bfloat16(), tp, [Shard(0)])
    model.forward = lambda: (rows * model.scale).to_local().sum()
    with CommDebugMode() as mode:
        model().backward()
    assert torch.equal(full(model.scale.grad), torch.full((4,), 257.0))
    reduces = {str(name): count for name, count in mode.get_comm_counts().items() if "reduce" in str(name)}
    assert sum(reduces.values()) == 2 + 1  # tensor parallel ranks, data ranks; and a flag of the preflight


@ranks(4)
def test_meshes_that_do_not_fit_together_are_named_with_the_remedy() -> None:
    data, tp = meshes((2, 2))
    weight = distribute_tensor(torch.randn(4, 4), tp, [Shard(0)])
    for mesh in (None, init_device_mesh("cpu", (4,), mesh_dim_names=("all",)), tp):
        with pytest.raises(VescaleError, match=r"w: is sharded on .*tp=2.*Slice both from one init_device_mesh"):
            fully_shard(Weights(w=weight), mesh=mesh)
    partial = DTensor.from_local(torch.randn(4), tp, [Partial()])
    with pytest.raises(NotImplementedError, match=r"w: is placed as .*Partial.*Redistribute it before"):
        fully_shard(Weights(w=partial), mesh=data)


@ranks(4)
def test_an_error_on_one_tensor_parallel_rank_is_raised_on_all_with_one_text() -> None:
    data, tp = meshes((2, 2))
    model = Weights(w=distribute_tensor(torch.randn(4, 4), tp, [Shard(0)]), v=torch.randn(2, 3))
    if dist.get_rank() == 3:
        model.v = nn.Parameter(torch.randn(3, 2).t())

    def wrap_and_run() -> None:
        fully_shard(model, mesh=data)
        model()

    with pytest.raises(DivergenceError, match=r"NotImplementedError: v: shape .* has stride") as error:
        wrap_and_run()
    texts: list[Any] = [None] * 4
    dist.all_gather_object(texts, str(error.value))
    assert len(set(texts)) == 1


@ranks(4)
def test_an_optimizer_made_before_wrapping_is_found_also_where_it_holds_dtensors() -> None:
    data, tp = meshes((2, 2))
    model = Weights(w=distribute_tensor(torch.randn(4, 4), tp, [Shard(0)]))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=data)
    model().backward()
    with pytest.raises(VescaleError, match="made before fully_shard"):
        optim.step()


@pytest.mark.parametrize("foreach", [True, False])
@ranks(4)
def test_one_optimizer_steps_parameters_of_several_meshes(foreach: bool) -> None:
    data, tp = meshes((2, 2))
    whole = torch.randn(4, 4)
    model = Weights(w=distribute_tensor(whole, tp, [Shard(0)]), v=whole.clone())
    fully_shard(model, mesh=data)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optim.step()
    mine, other = (full(param) for param in model.parameters())
    assert torch.equal(mine, other)
    assert not torch.equal(mine, whole)


@ranks(8)
def test_parameters_stay_sharded_over_fewer_ranks_beside_tensor_parallelism() -> None:
    data, tp = meshes((4, 2))
    reference = Tower().double()
    model: Any = copy.deepcopy(reference)
    parallelize(model, tp)
    for block in model.blocks:
        fully_shard(block, mesh=data, reshard_after_forward=2)
    fully_shard(model, mesh=data)
    losses = train(model, data, data_rank(data))
    assert losses == pytest.approx(train(reference, None, (4, 0)), rel=1e-9)


@ranks(4)
def test_a_model_made_on_meta_and_checkpoints_of_it_are_exact() -> None:
    data, tp = meshes((2, 2))
    reference = Tower(hidden=5)
    with torch.device("meta"):
        model: Any = Tower(hidden=5)
    parallelize(model, tp)
    fully_shard(model, mesh=data)
    model.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    path: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    dcp.save(model.state_dict(), checkpoint_id=path[0])
    again = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load(again, checkpoint_id=path[0])
    plain = {name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items()}
    dcp.load(plain, checkpoint_id=path[0])
    for name, expected in reference.state_dict().items():
        assert torch.equal(full(again[name]), expected), name
        assert torch.equal(plain[name], expected), name
    save(f"{path[0]}/ours", model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(f"{path[0]}/ours", model)
    for bucket in iterate_tensors(model):
        for name, tensor in bucket.items():
            assert torch.equal(tensor, reference.state_dict()[name]), name
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path[0])


@ranks(4)
def test_a_weight_of_strided_shards_trains_and_is_whole_again() -> None:
    """Rows of queries, keys and values, of which each tensor parallel rank has its part of all three."""
    data, tp = meshes((2, 2))
    whole = torch.arange(24 * 4.0, dtype=torch.float64).view(24, 4)
    fused = distribute_tensor(whole, tp, [_StridedShard(0, split_factor=3)])
    rank = tp.get_local_rank()
    part = torch.cat([block.chunk(2)[rank] for block in whole.chunk(3)])
    assert torch.equal(fused.to_local(), part)
    model: Any = Weights(fused=fused)
    fully_shard(model, mesh=data)
    assert model.fused.placements == (RaggedShard((0,), (1, 1)), _StridedShard(0, split_factor=3))
    assert torch.equal(model.fused.full_tensor(), whole)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    reference = nn.Parameter(whole.clone())
    theirs = torch.optim.AdamW([reference], lr=0.1)
    for _ in range(2):
        model.forward = lambda: model.fused.to_local().square().sum()
        model().backward()
        reference.square().sum().backward()
        torch.testing.assert_close(full(model.fused.grad), reference.grad)
        for each in (optim, theirs):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(full(model.fused), reference.detach())
    model.load_state_dict({"fused": whole})
    assert torch.equal(full(model.fused), whole)


@ranks(4)
def test_parts_of_unequal_size_under_strided_shards_are_refused_by_name() -> None:
    data, tp = meshes((2, 2))
    part = torch.zeros(3 if tp.get_local_rank() else 4, 2)
    fused = DTensor.from_local(part, tp, [_StridedShard(0, split_factor=2)], shape=torch.Size((7, 2)), stride=(2, 1))
    with pytest.raises(NotImplementedError, match=r"fused: .* leave unequal parts of \(7, 2\)"):
        fully_shard(Weights(fused=fused), mesh=data)


@ranks(4)
def test_a_format_for_unequal_parts_and_a_way_to_fsdp2_are_refused_by_name() -> None:
    data, tp = meshes((2, 2))
    weight = distribute_tensor(torch.randn(5, 4), tp, [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"w: .* leaves unequal parts of \(5, 4\)"):
        fully_shard(Weights(w=weight), mesh=data, param_policy=lambda fqn, param: ParamPolicy(format="fp8_block"))
    model = Weights(w=weight)
    fully_shard(model, mesh=data)
    with pytest.raises(CheckpointError, match="w: is sharded by tensor or expert parallelism as well"):
        to_fsdp2(model)
