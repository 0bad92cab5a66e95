"""fully_shard is a drop-in: torch's names, signatures, methods, and what serious users do with them."""

from __future__ import annotations

import copy
import inspect
import logging
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from ranks import ranks
from small_models import TinyDecoder, Tower, batch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import vescale_fsdp
from vescale_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method, share_comm_ctx

POLICIES = ("CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy")
FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def wrapped(model: nn.Module, shard: object = fully_shard, **kwargs: object) -> nn.Module:
    for block in [*getattr(model, "blocks", ()), *getattr(model, "layers", ())]:
        shard(block, **kwargs)
    shard(model, **kwargs)
    return model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def grads_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if param.grad is None else full(param.grad) for param in model.parameters()]


def assert_same_grads(ours: nn.Module, reference: nn.Module) -> None:
    for (name, _), mine, theirs in zip(ours.named_parameters(), grads_of(ours), grads_of(reference), strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, msg=name)


# Names and signatures


def test_the_nine_public_names_are_there_and_policies_are_torchs_own() -> None:
    for name in (*POLICIES, *FUNCTIONS, "FSDPModule", "UnshardHandle"):
        assert name in vescale_fsdp.__all__
    for name in POLICIES:
        assert getattr(vescale_fsdp, name) is getattr(torch_fsdp, name)
    assert issubclass(vescale_fsdp.FSDPModule, torch_fsdp.FSDPModule)
    assert issubclass(vescale_fsdp.UnshardHandle, torch_fsdp.UnshardHandle)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_what_torchs_take(name: str) -> None:
    ours = inspect.signature(getattr(vescale_fsdp, name)).parameters
    theirs = inspect.signature(getattr(torch_fsdp, name)).parameters
    for key, parameter in theirs.items():
        assert (ours[key].kind, ours[key].default) == (parameter.kind, parameter.default), key
    for key in ours.keys() - theirs.keys():
        assert ours[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[key].default is not inspect.Parameter.empty


METHODS = [
    name
    for name, value in vars(torch_fsdp.FSDPModule).items()
    if inspect.isfunction(value) and (not name.startswith("_") or name in ("_apply", "_set_unshard_async_op"))
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_torchs_fsdp_module_is_ours_with_its_signature(name: str) -> None:
    assert name in vars(FSDPModule)
    ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (FSDPModule, torch_fsdp.FSDPModule))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


# Calls


@ranks(2)
def test_activation_checkpointing_in_both_orders_equals_the_reference_without_extra_gathers() -> None:
    reference = Tower()
    for outside in (True, False):
        model = copy.deepcopy(reference)
        for index, block in enumerate(model.blocks):
            fully_shard(block)
            if outside:
                model.blocks[index] = checkpoint_wrapper(block)
        if not outside:
            model = copy.deepcopy(reference)
            for index, block in enumerate(model.blocks):
                model.blocks[index] = fully_shard(checkpoint_wrapper(block))
        fully_shard(model)
        model(batch(9, 2, dist.get_rank())).square().mean().backward()
        model.zero_grad()
        reference.zero_grad()
        with CommDebugMode() as mode:
            model(batch(0, 2, dist.get_rank())).square().mean().backward()
        reference(batch(0, 2)).square().mean().backward()
        for mine, theirs in zip(grads_of(model), grads_of(reference), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert mode.get_total_counts() == 5 + 3


@ranks(2)
def test_two_forwards_before_one_backward_equal_the_reference() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    for each, rank in ((reference, None), (model, dist.get_rank())):
        (each(batch(0, 2, rank)).square().mean() + each(batch(1, 2, rank)).pow(3).mean()).backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_forward_without_gradients_then_training_equals_the_reference() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(batch(0, 2)), reference(batch(0, 2)))
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(1, 2, rank)).square().mean().backward()
    assert_same_grads(model, reference)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(8, 8)
        self.dec = nn.Linear(8, 8)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.enc(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.enc(x))


@ranks(2)
def test_a_registered_method_gathers_and_an_unregistered_one_says_what_to_do() -> None:
    reference = Encoder()
    model = copy.deepcopy(reference)
    fully_shard(model)
    with pytest.raises(
        ValueError, match=r"Linear with enc.weight, enc.bias was called outside.*Encoder.*register_fsdp"
    ):
        model.encode(batch(0, 1))
    register_fsdp_forward_method(model, "encode")
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each.encode(batch(0, 2, rank)).square().mean().backward()
    assert_same_grads(model, reference)
    assert register_fsdp_forward_method(reference, "anything") is None
    with pytest.raises(ValueError, match="does not have a method nothing"):
        register_fsdp_forward_method(model, "nothing")


@dataclass
class Result:
    value: torch.Tensor
    extra: dict[str, torch.Tensor]


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor | Result) -> Result:
        x = self.layer(x.value if isinstance(x, Result) else x)
        return Result(x, {"half": x / 2})


@ranks(2)
def test_dataclass_outputs_equal_the_reference() -> None:
    reference = nn.Sequential(Structured(), Structured())
    model = copy.deepcopy(reference)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 2, rank)).extra["half"].square().mean().backward()
    for mine, theirs in zip(grads_of(model), grads_of(reference), strict=True):
        torch.testing.assert_close(mine, theirs)


class Experts(nn.Module):
    """Two experts of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return self.head(self.experts[expert](x))


def expert_reference() -> Experts:
    """Rank 0 uses expert 0, rank 1 expert 1."""
    reference = Experts()
    for rank in range(2):
        (reference(batch(0, 2, rank), rank).square().mean() / 2).backward()
    return reference


@ranks(2)
def test_experts_wrapped_alone_and_used_on_some_ranks_only_reduce_on_request() -> None:
    reference = expert_reference()
    model = copy.deepcopy(reference)
    model.zero_grad()
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    for expert in model.experts:
        expert.unshard()  # ranks disagree on which expert runs, so none may gather in forward
    rank = dist.get_rank()
    model(batch(0, 2, rank), rank).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_experts_of_one_group_used_on_some_ranks_only_get_the_sum_over_ranks() -> None:
    reference = expert_reference()
    model = copy.deepcopy(reference)
    model.zero_grad()
    fully_shard(model)
    rank = dist.get_rank()
    model(batch(0, 2, rank), rank).square().mean().backward()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        # A rank without elements of a parameter that it does not use cannot know of the gradient, and needs none.
        local = param.to_local() * 0 if param.grad is None else param.grad.to_local()
        torch.testing.assert_close(
            DTensor.from_local(
                local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            ).full_tensor(),
            other.grad,
        )


@ranks(2)
def test_a_parameter_that_no_rank_uses_has_no_gradient() -> None:
    model = Experts()
    fully_shard(model)
    model(batch(0, 2, dist.get_rank()), 0).sum().backward()
    assert model.experts[0].weight.grad is not None
    assert model.experts[1].weight.grad is None


@ranks(2)
def test_tied_embeddings_stay_one_parameter_and_train_like_the_reference() -> None:
    reference = TinyDecoder()
    model = wrapped(copy.deepcopy(reference))
    assert model.head.weight is model.embed.weight
    tokens = torch.randint(0, 101, (4, 12), generator=torch.Generator().manual_seed(dist.get_world_size()))
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    rank = dist.get_rank()
    for _ in range(3):
        for each, optim, part in ((model, ours, tokens[2 * rank : 2 * rank + 2]), (reference, theirs, tokens)):
            logits = each(part[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
            optim.step()
            optim.zero_grad()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(mine), other.detach())
    assert model.state_dict()["head.weight"].to_local().data_ptr() == model.embed.weight.to_local().data_ptr()


@ranks(2)
def test_parameters_tied_across_calls_are_refused_by_name() -> None:
    model = TinyDecoder()
    fully_shard(model.embed)
    with pytest.raises(ValueError, match=r"head.weight is the same parameter as weight.*fully_shard\(\[module_a"):
        fully_shard(model)
    other = TinyDecoder()
    fully_shard([other.embed, other.head])
    fully_shard(other)


# Gradients


@ranks(2)
def test_custom_collectives_and_the_all_reduce_hook_work_with_several_groups() -> None:
    class Comm:
        calls = 0

        def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

    class Gather(Comm):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):  # type: ignore[no-untyped-def]
            Gather.calls += 1
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)

    class Reduce(Comm):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
            Reduce.calls += 1
            return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    reference = Tower()
    reference.head.double()
    reference.head.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    model = copy.deepcopy(reference)
    fully_shard(model)  # float32 and float64: two groups
    hooked: list[torch.dtype] = []
    model.set_custom_all_gather(Gather())
    model.set_custom_reduce_scatter(Reduce())
    model.set_all_reduce_hook(lambda grads: hooked.append(grads.dtype))
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 2, rank)).square().mean().backward()
    assert_same_grads(model, reference)
    assert (Gather.calls, Reduce.calls) == (2, 2)
    assert sorted(map(str, hooked)) == ["torch.float32", "torch.float64"]


@ranks(2)
def test_allocators_that_gloo_lacks_are_refused_by_the_backends_name() -> None:
    model = nn.Linear(4, 4)
    fully_shard(model)
    with pytest.raises(NotImplementedError, match="gloo backend has no allocator"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(NotImplementedError, match="gloo backend has no symmetric memory"):
        model.set_symm_mem_for_comm()


@ranks(2)
def test_post_accumulate_hooks_fire_once_per_synchronisation_with_the_sharded_gradient() -> None:
    model = nn.Linear(8, 8)
    calls: list[bool] = []
    model.weight.register_post_accumulate_grad_hook(lambda param: calls.append(isinstance(param.grad, DTensor)))
    fully_shard(model)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model(batch(0, 2, dist.get_rank())).sum().backward()
    assert calls == [True]


@ranks(2)
def test_a_separate_process_group_reduces_the_same() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    model.set_separate_reduce_scatter_group()
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 2, rank)).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_gradient_that_arrives_after_a_change_of_requires_grad_is_right() -> None:
    reference = Tower()
    reference.embed.requires_grad_(False)
    model = wrapped(copy.deepcopy(reference))
    for flip in (False, True):
        for each, rank in ((reference, None), (model, dist.get_rank())):
            each.embed.requires_grad_(flip)
            each.head.requires_grad_(not flip)
            each.zero_grad()
            each(batch(0, 2, rank)).square().mean().backward()
        assert_same_grads(model, reference)


# Prefetch, resharding to fewer ranks, offload


@ranks(2)
def test_prefetch_lists_change_the_order_of_gathers_and_not_the_result() -> None:
    reference = Tower(depth=4)
    model = wrapped(copy.deepcopy(reference))
    model.set_modules_to_forward_prefetch(list(model.blocks[:2]))
    for index, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 3]))
        block.set_modules_to_backward_prefetch(list(reversed(model.blocks[max(index - 2, 0) : index])))
    for step in range(2):
        for each, rank in ((reference, None), (model, dist.get_rank())):
            each(batch(step, 2, rank)).square().mean().backward()
    assert_same_grads(model, reference)
    with pytest.raises(ValueError, match="expected modules that fully_shard wrapped"):
        model.set_modules_to_forward_prefetch([reference])


@pytest.mark.parametrize("num_ranks_after", [2, 1, 4])
@ranks(4)
def test_resharding_to_fewer_ranks_equals_the_reference(num_ranks_after: int) -> None:
    reference = Tower(depth=2)
    model = wrapped(copy.deepcopy(reference), reshard_after_forward=num_ranks_after)
    out = model(batch(0, 4, dist.get_rank()))
    if num_ranks_after == 2:
        kept = model.blocks[0].up.weight
        assert kept.device_mesh.shape == (2, 2)
        assert torch.equal(kept.full_tensor(), reference.blocks[0].up.weight)
    else:
        assert isinstance(model.blocks[0].up.weight, DTensor) == (num_ranks_after == 4)
    out.square().mean().backward()
    reference(batch(0, 4)).square().mean().backward()
    assert_same_grads(model, reference)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    assert model.blocks[0].up.weight.device_mesh.ndim == 1


@ranks(4)
def test_a_number_of_ranks_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="should be a factor of 4, not 3"):
        fully_shard(nn.Linear(4, 4), reshard_after_forward=3)


@ranks(1, 2)
def test_offloaded_parameters_gradients_and_states_are_on_the_cpu_and_equal_the_reference() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference), offload_policy=vescale_fsdp.CPUOffloadPolicy())
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference))
    for step in range(2):
        for each, rank in ((reference, None), (model, dist.get_rank())):
            each.zero_grad()
            each(batch(step, dist.get_world_size(), rank)).square().mean().backward()
        assert_same_grads(model, reference)
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            other.grad = full(param.grad)
            assert param.grad.device.type == param.device.type == "cpu"
        ours.step()
        theirs.step()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(param), other)


# Iterations that fail, several roots, pipelines, logging


@pytest.mark.parametrize("where", ["forward", "backward"])
@ranks(2)
def test_after_an_exception_and_a_reset_the_next_step_equals_the_reference(where: str) -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    model(batch(3, 2, dist.get_rank())).sum().backward()
    model.zero_grad()
    groups = [group for block in (model, *model.blocks) for group in block._get_fsdp_state().groups]

    def fail(*_: object) -> None:
        raise ArithmeticError("planned")

    if where == "forward":
        handle = model.blocks[1].up.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            model(batch(0, 2, dist.get_rank()))
    else:
        loss = model(batch(0, 2, dist.get_rank())).square().mean()
        handle = model.blocks[0].up.register_full_backward_hook(fail)
        hidden: list[torch.Tensor] = []
        catch = model.blocks[0].register_forward_hook(lambda module, args, out: hidden.append(out))
        loss = model(batch(0, 2, dist.get_rank())).square().mean()
        hidden[0].register_hook(fail)
        catch.remove()
        with pytest.raises(ArithmeticError):
            loss.backward()
    handle.remove()
    model.reset_iter_state()
    assert all(param.grad is None for param in model.parameters())
    assert all(not group.is_unsharded and group._whole.flat.untyped_storage().size() == 0 for group in groups)
    assert all(not group.reduction.holds_memory for group in groups)
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(1, 2, rank)).square().mean().backward()
    assert_same_grads(model, reference)
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model.blocks[0].reset_iter_state()


@ranks(2)
def test_an_exception_in_forward_frees_the_parameters_and_keeps_the_gradients_held_so_far() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    groups = [group for block in (model, *model.blocks) for group in block._get_fsdp_state().groups]
    model.set_requires_gradient_sync(False)
    model(batch(0, 2, dist.get_rank())).square().mean().backward()
    handle = model.blocks[1].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(3, 2, dist.get_rank()))
    handle.remove()
    assert all(not group.is_unsharded and group._whole.flat.untyped_storage().size() == 0 for group in groups)
    model.set_requires_gradient_sync(True)
    try:
        raise KeyError("a forward inside an except clause is not a failed one")
    except KeyError:
        model(batch(1, 2, dist.get_rank())).square().mean().backward()
    for step in range(2):
        reference(batch(step, 2)).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_several_roots_share_one_context() -> None:
    references = [Tower(), Tower()]
    models = [wrapped(copy.deepcopy(each)) for each in references]
    share_comm_ctx(models)
    streams = {id(model._get_fsdp_state().schedule.streams) for model in models}
    assert len(streams) == 1
    for model, reference in zip(models, references, strict=True):
        for each, rank in ((reference, None), (model, dist.get_rank())):
            each(batch(0, 2, rank)).square().mean().backward()
        assert_same_grads(model, reference)
    with pytest.raises(ValueError, match="expected modules that fully_shard wrapped"):
        share_comm_ctx([nn.Linear(1, 1)])


@ranks(2)
def test_what_pipelining_reaches_for_is_there() -> None:
    reference = Tower()
    model = wrapped(copy.deepcopy(reference))
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        for each, rank in ((reference, None), (model, dist.get_rank())):
            each(batch(step, 2, rank)).square().mean().backward()
    assert all(
        param.grad is None
        for state in model._get_fsdp_state().schedule.states
        for group in state.groups
        for param in group.shards.params
    )
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    root_state = torch_fsdp.fully_shard.state(model)  # as torch.distributed.pipelining's REDUCE_GRAD does
    for state in root_state._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root_state._root_post_backward_final_callback()
    assert_same_grads(model, reference)
    assert isinstance(model.embed.weight, DTensor)


@ranks(2)
def test_one_line_about_the_plan_is_logged_by_rank_zero() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vescale_fsdp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = wrapped(Tower())
        for _ in range(2):
            model(batch(0, 2))
    finally:
        logger.removeHandler(handler)
    assert len(lines) == (1 if dist.get_rank() == 0 else 0)
    assert all("Tower: 684 parameters in 3 groups" in line for line in lines)


@ranks(2)
def test_profiler_labels_name_the_module() -> None:
    model = wrapped(Tower())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(batch(0, 2)).sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {"vescale::all_gather (blocks.1)", "vescale::reduce (blocks.1)", "vescale::reduce (root)"} <= names


@ranks(2)
def test_parameters_of_two_dtypes_train_in_one_call_and_keep_their_dtype() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.high = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(x.bfloat16()).float())

    reference = Mixed()
    model = copy.deepcopy(reference)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for each, rank in ((reference, None), (model, dist.get_rank())):
        each(batch(0, 2, rank)).square().mean().backward()
    for mine, theirs in zip(grads_of(model), grads_of(reference), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01)
        assert mine.dtype == theirs.dtype
    optim.step()


@ranks(2)
def test_an_empty_parameter_gets_an_empty_gradient() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 0)})
    model.forward = lambda x: model["a"](x).sum() + model["b"](x).sum() * 0  # type: ignore[method-assign]
    net = nn.Sequential(nn.Linear(4, 4))
    net.add_module("empty", nn.Linear(4, 0))
    fully_shard(net)
    net(batch(0, 2, width=4)).sum().backward()
    assert full(net.empty.weight.grad).shape == (0, 4)
    assert net[0].weight.grad is not None


@ranks(2)
def test_inputs_and_outputs_are_cast_inside_containers() -> None:
    model = Structured()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    result = model(Result(batch(0, 1), {"n": torch.arange(3)}))
    assert result.value.dtype == result.extra["half"].dtype == torch.float32
    model.zero_grad()


def cuda_that_is_not_there(check_available: bool = False) -> torch.device | None:
    """What torch says in a build for CUDA on a machine without a device."""
    return None if check_available else torch.device("cuda")


@ranks(2)
def test_a_build_for_an_accelerator_that_is_not_there_trains_on_the_cpu() -> None:
    before = torch.accelerator.current_accelerator
    torch.accelerator.current_accelerator = cuda_that_is_not_there
    try:
        model = nn.Linear(4, 4)
        fully_shard(model)
        model(batch(0, 2, width=4)).sum().backward()
        assert model.weight.device_mesh.device_type == "cpu"
    finally:
        torch.accelerator.current_accelerator = before
