"""What fully_shard promises about the module it wraps: identity, names, grouping, zero copies, collectives."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import ranks
from small_models import Block, Odd, Tower, batch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile
from wrapping import full, wrapped

from ragged_dtensor import RaggedShard
from vescale_fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    explain,
    fully_shard,
    report,
    traffic,
)
from vescale_fsdp.group import transfer
from vescale_fsdp.state import find_state


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).float().square().mean().backward()


@ranks(2)
def test_wrapping_is_in_place_and_keeps_names() -> None:
    model = Tower()
    model.register_buffer("table", torch.arange(3.0))
    before, names = model, (list(dict(model.named_parameters())), list(dict(model.named_modules())))
    keys, table = list(model.state_dict()), model.table
    assert wrapped(model) is before
    assert isinstance(model, (Tower, FSDPModule, TorchFSDPModule))
    assert isinstance(model, Tower)
    assert isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], Block)
    assert (list(dict(model.named_parameters())), list(dict(model.named_modules()))) == names
    assert list(model.state_dict()) == keys
    assert model.table is table
    assert all(isinstance(param, DTensor) and isinstance(param, nn.Parameter) for param in model.parameters())
    assert all(isinstance(param.placements[0], RaggedShard) for param in model.parameters())


@ranks(2)
def test_a_list_of_modules_is_one_unit_and_returned_as_it_is() -> None:
    model = Tower()
    units = [model.embed, model.head]
    assert fully_shard(units) is units
    assert find_state(model.embed) is find_state(model.head)
    fully_shard(model)
    reference = Tower()
    reference.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    x = batch(0, 2)
    torch.testing.assert_close(model(x), reference(x))


@ranks(2)
def test_each_parameter_belongs_to_the_innermost_wrapped_module() -> None:
    model = wrapped(Tower())
    model(batch(0, 2, 0))
    groups = {group.name: [spec.fqn for spec in group.plan.specs] for group in report(model).groups}
    assert set(groups) == {"root", "blocks.0", "blocks.1"}
    assert groups["blocks.1"][0] == "blocks.1.norm.weight"
    assert sorted(itertools.chain(*groups.values())) == sorted(name for name, _ in model.named_parameters())
    assert "embed.weight" in groups["root"]


@pytest.mark.parametrize("reshard", [True, False, None])
@ranks(2)
def test_parameters_after_forward_follow_reshard_after_forward(reshard: bool | None) -> None:
    model = wrapped(Tower(), reshard_after_forward=reshard)
    model(batch(0, 2, 0))
    for module, expected in ((model.blocks[0].up, reshard is not False), (model.embed, reshard is True)):
        assert isinstance(module.weight, DTensor) == expected


@pytest.mark.parametrize("reshard", [True, False, None])
@ranks(2, 3)
def test_collectives_equal_fsdp2_number_by_number(reshard: bool | None) -> None:
    counts = []
    for shard in (fully_shard, torch_fully_shard):
        model = Tower()
        for block in model.blocks:
            shard(block, reshard_after_forward=reshard)
        shard(model, reshard_after_forward=reshard)
        for index in range(2):
            with CommDebugMode() as mode:
                step(model, batch(index, 2, 0))
        counts.append({str(op): count for op, count in mode.comm_counts.items()})
    assert counts[0] == counts[1]


@ranks(4)
def test_collectives_equal_fsdp2_when_two_ranks_keep_a_shard_after_forward() -> None:
    counts = []
    for shard in (fully_shard, torch_fully_shard):
        model = Tower()
        for block in model.blocks:
            shard(block, reshard_after_forward=2)
        shard(model)
        for index in range(2):
            with CommDebugMode() as mode:
                step(model, batch(index, 4, 0))
        counts.append({str(op): count for op, count in mode.comm_counts.items()})
    assert counts[0] == counts[1]


@ranks(2)
def test_traffic_counts_what_the_plan_says() -> None:
    model = wrapped(Tower())
    step(model, batch(0, 2, 0))
    before = traffic(model)
    step(model, batch(1, 2, 0))
    moved = traffic(model) - before
    blocks, root = report(model).groups[1:], report(model).groups[0]
    once = sum(group.whole_nbytes for group in blocks) + root.whole_nbytes
    assert (moved.gathers, moved.reduces) == (5, 3)  # blocks gather again in backward, the root does not
    assert moved.gathered_bytes == once + sum(group.whole_nbytes for group in blocks)
    assert moved.reduced_bytes == once
    assert moved.wire_bytes == (moved.gathered_bytes + moved.reduced_bytes) // 2
    assert "blocks.1" in explain(model)


@ranks(1)
def test_one_rank_communicates_and_copies_nothing() -> None:
    model = wrapped(Tower())
    with CommDebugMode() as mode:
        step(model, batch(0, 1))
    assert mode.get_total_counts() == 0
    moved = traffic(model)
    assert (moved.collectives, moved.wire_bytes, moved.copied_bytes) == (0, 0, 0)
    param = model.blocks[0].up.weight
    address = param.to_local().data_ptr()
    model.blocks[0].unshard()
    assert model.blocks[0].up.weight.data_ptr() == address


@pytest.mark.parametrize("model_type", [Tower, Odd])
@ranks(2, 3)
def test_unsharded_parameters_lie_at_their_planned_place(model_type: type[nn.Module]) -> None:
    model = wrapped(model_type())
    model(batch(0, 2, 0))
    for group in [group for state in find_state(model).schedule.states for group in state.groups]:
        group.to_sharded()
        group.unshard()
        group.wait_for_unshard()
        owners = {each.fqn: each.module._parameters[each.owners[0][1]] for each in group.shards.managed}
        base = next(iter(owners.values())).untyped_storage().data_ptr()
        for (_, param), tensor in zip(owners.items(), group.plan.tensors, strict=True):
            assert param.untyped_storage().data_ptr() == base
            assert param.data_ptr() == base + tensor.start * param.itemsize
            assert tensor.start * 2 % 16 == 0


@ranks(2)
def test_the_gather_reads_the_shard_and_writes_the_parameters_memory() -> None:
    model = wrapped(Tower())
    seen = []
    gather = transfer._torch.all_gather

    def watch(output: torch.Tensor, source: torch.Tensor, **kwargs: object) -> object:
        seen.append((source.data_ptr(), output.data_ptr()))
        return gather(output, source, **kwargs)

    shard = model.blocks[0].norm.weight.to_local().untyped_storage().data_ptr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer._torch, "all_gather", watch)
        model.blocks[0].unshard()
    assert seen == [(shard, model.blocks[0].norm.weight.data_ptr())]


@ranks(2)
def test_nothing_is_copied_around_collectives_in_float32() -> None:
    model = wrapped(Tower())
    step(model, batch(0, 2, 0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model, batch(1, 2, 0))
    counts = {event.key: event.count for event in profiler.key_averages()}
    for op in ("aten::cat", "aten::_chunk_cat", "aten::split_with_sizes_copy", "fsdp::chunk_cat"):
        assert op not in counts
    copies = [parents(event) for event in profiler.events() if event.name == "aten::copy_"]
    # gloo clones the input, and converts the scalar that it divides by.
    copies = [above for above in copies if not {"c10d::_reduce_scatter_base_", "aten::_to_copy"} & set(above)]
    # One write per gradient, into the reduce input. The copy in a reduction is gloo's own: it lacks a reduce-scatter.
    params = len(list(model.parameters()))
    assert sum("aten::_foreach_copy_" in above for above in copies) == params
    assert sum(any("vescale::reduce" in name for name in above) for above in copies) == params + 3
    assert sum(any("vescale::all_gather" in name for name in above) for above in copies) == 0
    assert traffic(model).copied_bytes == 2 * 4 * sum(param.numel() for param in model.parameters())


def parents(event: object) -> list[str]:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(event.name)
    return names


@ranks(2)
def test_every_share_and_start_is_sixteen_byte_aligned() -> None:
    for model, itemsize in ((Odd(), 4), (Tower().bfloat16(), 2)):
        wrapped(model)
        for group in report(model).groups:
            assert all(lane.share * itemsize % 16 == 0 for lane in group.plan.lanes)
            assert all(tensor.start * itemsize % 16 == 0 for tensor in group.plan.tensors)


@ranks(2)
def test_frozen_parameters_cost_no_gradient_memory_and_no_reduction() -> None:
    model = Tower()
    for name, param in model.named_parameters():
        param.requires_grad = "head" in name
    wrapped(model)
    step(model, batch(0, 2, 0))
    trainable = 2 * sum(-(-param.numel() // 8) * 8 for param in (model.head.weight, model.head.bias)) // 2
    assert traffic(model).reduces == 1
    assert traffic(model).reduced_bytes <= 4 * (trainable + 16)
    assert model.embed.weight.grad is None
    assert model.head.weight.grad is not None
    frozen = [
        group for state in find_state(model).schedule.states for group in state.groups if group.kind.endswith("frozen")
    ]
    assert all(group.reduction._gradients is None for group in frozen)


@ranks(2)
def test_ignored_parameters_stay_as_they_are() -> None:
    model = Tower()
    ignored = [model.head.bias]
    bias = model.head.bias
    wrapped(model, ignored_params=ignored)
    assert model.head.bias is bias
    assert type(bias) is nn.Parameter
    step(model, batch(dist.get_rank(), 1))
    assert not torch.equal(bias.grad, torch.zeros(4))
    total = bias.grad.clone()
    dist.all_reduce(total)
    assert not torch.equal(total, bias.grad * 2)  # each rank has its own: nothing was reduced


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop]


@pytest.mark.parametrize("foreach", [True, False])
@ranks(3)
def test_optimizers_step_without_communication_and_states_follow_the_parameters(foreach: bool) -> None:
    for optimizer in OPTIMIZERS:
        torch.manual_seed(1)
        reference = Odd()
        model = wrapped(copy.deepcopy(reference))
        kwargs = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        ours = optimizer(model.parameters(), lr=0.1, foreach=foreach, **kwargs)
        theirs = optimizer(reference.parameters(), lr=0.1, foreach=foreach, **kwargs)
        step(model, batch(0, 3, dist.get_rank()))
        for param, sharded in zip(reference.parameters(), model.parameters(), strict=True):
            param.grad = full(sharded.grad)
        with CommDebugMode() as mode:
            ours.step()
        theirs.step()
        assert mode.get_total_counts() == 0
        for param, sharded in zip(reference.parameters(), model.parameters(), strict=True):
            assert torch.equal(full(sharded), param), optimizer
            for name, value in ours.state[sharded].items():
                if torch.is_tensor(value) and value.dim() and name != "step":
                    assert value.placements == sharded.placements


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@ranks(2, 3)
def test_clipping_equals_one_process(norm_type: float) -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    ranks_ = dist.get_world_size()
    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        for each, rank in ((reference, None), (model, dist.get_rank())):
            each.zero_grad()
            step(each, batch(0, ranks_, rank))
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        torch.testing.assert_close(full(clip(model.parameters(), 0.01, norm_type)), expected)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, rtol=1e-4, atol=1e-7)


@ranks(2)
def test_a_nonfinite_norm_raises_on_every_rank_before_any_gradient_changes() -> None:
    model = wrapped(Tower())
    step(model, batch(0, 2, dist.get_rank()))
    grad = model.embed.weight.grad.to_local()
    if dist.get_rank() == 0:
        grad.view(-1)[0] = float("inf")
    before = grad.clone()
    with pytest.raises(RuntimeError, match="No gradient was changed"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(grad, before)


@ranks(2)
def test_mixed_precision_acts_like_fsdp2() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float16, True)
    seen: dict[str, list[object]] = {"ours": [], "theirs": []}
    source = Tower()
    for key, shard in (("ours", fully_shard), ("theirs", torch_fully_shard)):
        model = copy.deepcopy(source)
        model.blocks[0].requires_grad_(False)
        for block in model.blocks:
            shard(block, mp_policy=policy)
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float64))
        log = seen[key]
        for block in model.blocks:
            block.up.register_forward_pre_hook(lambda m, args, log=log: log.append((args[0].dtype, m.weight.dtype)))
            block.register_forward_hook(lambda m, args, out, log=log: log.append(out.dtype))
        out = model(batch(0, 2, dist.get_rank()))
        out.square().mean().backward()
        log.append((out.dtype, [full(param.grad) for param in model.parameters() if param.grad is not None]))
    *ours, (dtype, grads) = seen["ours"]
    *theirs, (other_dtype, other_grads) = seen["theirs"]
    assert (ours, dtype) == (theirs, other_dtype)
    assert dtype == torch.float64
    assert {grad.dtype for grad in grads} == {torch.float32}
    assert all(torch.equal(*pair) for pair in zip(grads, other_grads, strict=True))


@ranks(2)
def test_values_loaded_by_assignment_move_into_the_buffer_under_the_same_parameter() -> None:
    model = wrapped(Tower())
    params = dict(model.named_parameters())
    wanted = {name: value.detach() * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(wanted, assign=True)
    for name, param in model.named_parameters():
        assert param is params[name]
        assert torch.equal(full(param), full(wanted[name]))
    (group,) = find_state(model.blocks[0]).groups
    storage = group.shards.buffer.flat.untyped_storage().data_ptr()
    assert all(param.to_local().untyped_storage().data_ptr() == storage for param in model.blocks[0].parameters())


@ranks(2)
def test_a_model_made_on_meta_is_materialised_into_buffers() -> None:
    with torch.device("meta"):
        model = Tower()
    wrapped(model)
    with pytest.raises(RuntimeError, match=r"meta device.*embed.weight.*to_empty"):
        model(batch(0, 2, 0))
    params = list(model.parameters())
    model.to_empty(device="cpu")
    assert all(new is old for new, old in zip(model.parameters(), params, strict=True))
    torch.manual_seed(5)
    reference = Tower()
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            ours.copy_(torch.distributed.tensor.DTensor.from_local(theirs, ours.device_mesh, run_check=False))
    torch.testing.assert_close(model(batch(0, 2)), reference(batch(0, 2)))


@ranks(2)
def test_unshard_and_reshard_swap_the_registered_parameters() -> None:
    model = wrapped(Tower())
    expected = full(model.embed.weight)
    handle = model.unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.embed.weight, DTensor)
    assert torch.equal(model.embed.weight, expected)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    model.reshard()
    assert isinstance(model.embed.weight, DTensor)
