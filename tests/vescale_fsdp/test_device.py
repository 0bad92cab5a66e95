"""What only an accelerator shows: zero copies there, the order of streams, slots that stop growing, pinned offload.

One device is enough but where a test says so: a rank of NCCL alone, or rank 0 of eight whose collectives do nothing, so
that sizes and streams are those of a real rank and values mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpt_models import GPT, Shape
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from wrapping import full, wrapped

from vescale_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, traffic
from vescale_fsdp.group.streams import NUM_LANES, DeviceStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
]

DEVICE = "cuda"
SHAPE = Shape(4, 256, 4, 1024, 512, length=32)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_of_eight() -> Iterator[None]:
    """Rank 0 of eight that do not exist."""
    torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def sharded(shard: Any = fully_shard, **options: Any) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    return wrapped(GPT(SHAPE).to(DEVICE), shard, mesh=mesh, **options)


def text(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, SHAPE.vocabulary, (2, SHAPE.length), generator=generator).to(DEVICE)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.device(DEVICE):  # the model makes places
        scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model: Any, steps: int, optim: torch.optim.Optimizer | None = None) -> list[float]:
    """Losses of next-token prediction."""
    losses = []
    for number in range(steps):
        loss = loss_of(model, text(number))
        loss.backward()
        if optim is not None:
            optim.step()
            optim.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("one_of_eight")
def test_gathered_parameters_are_views_of_one_storage_and_nothing_is_copied_to_gather_them() -> None:
    model = sharded()
    with torch.no_grad():
        loss_of(model, text(0))
    assert traffic(model).copied_bytes == 0
    assert traffic(model).gathers > 0
    block = model.blocks[0]
    block.unshard()
    assert len({param.untyped_storage().data_ptr() for param in block.parameters()}) == 1
    assert all(param.device.type == DEVICE for param in block.parameters())


@pytest.mark.usefixtures("one_of_eight")
def test_every_gradient_is_written_once_on_its_way_into_the_reduction() -> None:
    model = sharded()
    train(model, 1)
    before = traffic(model).copied_bytes
    model.zero_grad()
    train(model, 1)
    assert traffic(model).copied_bytes - before == 4 * sum(param.numel() for param in model.parameters())


@pytest.mark.usefixtures("nccl")
def test_ten_steps_with_streams_take_the_losses_of_fsdp2() -> None:
    losses = []
    for shard in (fully_shard, torch_fully_shard):
        model = sharded(shard, mp_policy=BF16)
        losses.append(train(model, 10, torch.optim.AdamW(model.parameters(), lr=1e-3)))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


@pytest.mark.usefixtures("one_of_eight")
def test_gathers_and_reductions_have_streams_of_their_own_and_none_is_marked_by_record_stream() -> None:
    model = sharded(mp_policy=BF16)
    marked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: marked.append(tensor.shape))
        train(model, 3)
    assert isinstance(model._get_fsdp_state().schedule.streams, DeviceStreams)
    assert marked == []


@pytest.mark.usefixtures("one_of_eight")
def test_a_lane_waits_for_the_last_use_of_its_buffer_and_reductions_for_backward() -> None:
    """Computation that takes long is not overtaken: what is gathered next does not overwrite what it still reads."""
    streams = DeviceStreams(torch.device(DEVICE, 0))
    value = torch.zeros(1 << 20, device=DEVICE)
    lanes = [streams.take_lane() for _ in range(NUM_LANES + 1)]
    assert lanes == [*range(NUM_LANES), 0]
    torch.cuda._sleep(200_000_000)  # a tenth of a second of computation that reads the lane's buffer
    seen = value.clone()
    streams.done_with(0)
    with streams.gathering(0):
        value.fill_(1)  # the next gather into the same memory
    streams.use(streams.gathered(0))
    torch.cuda.synchronize()
    assert seen.sum().item() == 0
    assert value.sum().item() == value.numel()
    torch.cuda._sleep(200_000_000)
    value.fill_(2)
    with streams.reducing():
        reduced = value.clone()
    streams.reduced(lambda: None)
    streams.finish_backward()
    torch.cuda.synchronize()
    assert reduced.sum().item() == 2 * value.numel()


@pytest.mark.usefixtures("one_of_eight")
def test_the_allocator_reserves_nothing_after_the_second_step_and_no_more_than_for_fsdp2() -> None:
    reserved = {}
    for shard in (torch_fully_shard, fully_shard):
        torch.cuda.empty_cache()
        model = sharded(shard, mp_policy=BF16)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        torch.cuda.reset_peak_memory_stats()
        train(model, 2, optim)
        early = torch.cuda.max_memory_reserved()
        train(model, 8, optim)
        reserved[shard] = torch.cuda.max_memory_reserved()
        if shard is fully_shard:
            assert reserved[shard] == early
        del model, optim
    assert reserved[fully_shard] <= reserved[torch_fully_shard]


@pytest.mark.usefixtures("nccl")
def test_offloaded_shards_and_gradients_are_pinned_and_train_as_on_the_device() -> None:
    models = [sharded(), sharded(offload_policy=CPUOffloadPolicy())]
    losses = [train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    train(models[1], 1)
    for param in models[1].parameters():
        assert param.device.type == "cpu"
        assert param.to_local().is_pinned()
        assert param.grad is not None
        assert param.grad.device.type == "cpu"


@pytest.mark.usefixtures("nccl")
def test_memory_of_nccls_own_allocator_changes_no_gradient() -> None:
    """With one rank nothing is sent: what can go wrong is the allocation, and the copies into it and out of it."""
    models = [sharded(mp_policy=BF16) for _ in range(2)]
    for module in (models[0], *models[0].blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)
    for model in models:
        train(model, 2)
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full(mine.grad), full(other.grad))


def gather_in_symmetric_memory(rank: int, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    models = [sharded(mp_policy=BF16) for _ in range(2)]
    for module in (models[0], *models[0].blocks):
        module.set_symm_mem_for_comm()
    for model in models:
        train(model, 2)
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(full(mine.grad), full(other.grad))
    dist.destroy_process_group()


@pytest.mark.subprocess
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and they are not here")
def test_gathers_in_symmetric_memory_change_no_gradient(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(gather_in_symmetric_memory, args=(str(tmp_path / "store"),), nprocs=2)
