"""AdamW8bit on one process: the update, the size of its state, what it refuses, and saved state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from vescale_int8 import INT8_FORMATS

from vescale_fsdp.errors import VescaleError
from vescale_fsdp.formats.block_format import decode, encode
from vescale_fsdp.optim.adamw8bit import AdamW8bit

SIGNED, UNSIGNED = INT8_FORMATS["dynamic8_block"], INT8_FORMATS["dynamic8_block_unsigned"]


def with_gradient(*shapes: tuple[int, ...], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 0.1
    return params


def state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    )


def test_small_parameters_step_as_torch_adamw_does() -> None:
    ours, torchs = with_gradient((40,), (3, 5), ()), with_gradient((40,), (3, 5), ())
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3}
    one, two = AdamW8bit(ours, **options), torch.optim.AdamW(torchs, **options)
    for _ in range(5):
        one.step()
        two.step()
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(one.state[a]["exp_avg_sq"], two.state[b]["exp_avg_sq"])


def test_a_step_in_blocks_is_adamw_between_two_roundings_of_the_state() -> None:
    (param,) = with_gradient((70, 96))
    optimizer = AdamW8bit([param], lr=0.1, weight_decay=0.0)
    exp_avg = exp_avg_root = torch.zeros(70 * 96)
    expected = param.detach().flatten().clone()
    for step in (1, 2, 3):
        grad = param.grad.flatten()
        exp_avg = 0.9 * exp_avg + 0.1 * grad
        exp_avg_sq = 0.999 * exp_avg_root**2 + 0.001 * grad**2
        expected -= 0.1 * (exp_avg / (1 - 0.9**step)) / ((exp_avg_sq / (1 - 0.999**step)).sqrt() + 1e-8)
        optimizer.step()
        torch.testing.assert_close(param.detach().flatten(), expected)
        exp_avg = decode(SIGNED, encode(SIGNED, exp_avg, (70, 96)), (70, 96), 70 * 96)
        exp_avg_root = decode(UNSIGNED, encode(UNSIGNED, exp_avg_sq.sqrt(), (70, 96)), (70, 96), 70 * 96)


def test_long_tensors_step_in_chunks_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,), (chunked,) = with_gradient((100, 64)), with_gradient((100, 64))
    AdamW8bit([whole]).step()
    monkeypatch.setattr("vescale_fsdp.optim.blocks.CHUNK_NUMEL", 32 * 64)
    optimizer = AdamW8bit([chunked])
    optimizer.step()
    assert torch.equal(whole, chunked)
    assert optimizer.state[chunked]["exp_avg_scales"].shape == (4 * 2,)


def test_state_takes_at_most_2_1_bytes_per_element() -> None:
    params = with_gradient((512, 512), (130, 1000), (512,), (64, 64))
    optimizer = AdamW8bit(params)
    optimizer.step()
    assert state_nbytes(optimizer) <= 2.1 * sum(param.numel() for param in params)


def test_state_is_in_blocks_from_min_numel_elements_and_two_dims_on() -> None:
    params = with_gradient((64, 64), (63, 65), (5000,))
    optimizer = AdamW8bit(params)
    optimizer.step()
    assert [optimizer.state[param].get("exp_avg_codes") is not None for param in params] == [True, False, False]
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.float32


def test_any_format_with_8_bit_codes_holds_state() -> None:
    (param,) = with_gradient((128, 128))
    optimizer = AdamW8bit([param], state_format="mxfp8", root_format="mxfp8")
    optimizer.step()
    assert optimizer.state[param]["exp_avg_scales"].dtype == torch.uint8
    (whole,) = with_gradient((128, 128))
    unquantized = AdamW8bit([whole], state_format=None)
    unquantized.step()
    assert unquantized.state[whole]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(param, whole)  # the first step does not depend on how its result is stored


def test_bfloat16_parameters_step_in_float32() -> None:
    (param,) = with_gradient((64, 64))
    narrow = nn.Parameter(param.detach().bfloat16())
    wide = nn.Parameter(narrow.detach().float())
    narrow.grad = param.grad.bfloat16()
    wide.grad = narrow.grad.float()
    AdamW8bit([narrow]).step()
    AdamW8bit([wide]).step()
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loaded_state_continues_bit_by_bit(dtype: torch.dtype) -> None:
    shapes = ((64, 64), (10,))
    params = [nn.Parameter(param.detach().to(dtype)) for param in with_gradient(*shapes)]
    grads = [param.grad.to(dtype) for param in with_gradient(*shapes)]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    first = AdamW8bit(params, lr=0.01)
    first.step()
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    second = AdamW8bit(twins, lr=0.5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for twin, grad in zip(twins, grads, strict=True):
        twin.grad = grad.clone()
    first.step()
    second.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        for key, value in first.state[param].items():
            assert second.state[twin][key].dtype == value.dtype
            assert torch.equal(second.state[twin][key], value)


def test_state_of_another_optimizer_is_refused_by_name() -> None:
    (param,) = with_gradient((64, 64))
    other = torch.optim.AdamW([("w", param)])
    other.step()
    ours = AdamW8bit([("w", param)])
    saved = ours.state_dict()
    saved["state"] = other.state_dict()["state"]
    with pytest.raises(VescaleError, match=r"w: the loaded state has .*'exp_avg'.* not \['exp_avg_codes'"):
        ours.load_state_dict(saved)


def test_sparse_gradients_are_refused_by_name() -> None:
    (param,) = with_gradient((64, 64))
    param.grad = param.grad.to_sparse()
    with pytest.raises(VescaleError, match="embed: AdamW8bit does not support sparse gradients"):
        AdamW8bit([("embed", param)]).step()


def test_formats_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(VescaleError, match=r"same blocks and 8-bit codes, got dynamic8_block \(\(32, 32\), 8 bits\)"):
        AdamW8bit(with_gradient((64, 64)), root_format="dynamic8_flat_unsigned")
    with pytest.raises(VescaleError, match="mxfp4"):
        AdamW8bit(with_gradient((64, 64)), state_format="mxfp4", root_format="mxfp4")
    with pytest.raises(VescaleError, match="no block format is named 'int9'"):
        AdamW8bit(with_gradient((64, 64)), state_format="int9")


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}], ids=str
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(VescaleError, match=next(iter(wrong))):
        AdamW8bit(with_gradient((4, 4)), **wrong)


def test_a_rare_large_gradient_does_not_blow_up_its_neighbours() -> None:
    """With the second moment itself in 8 bits, elements 10,000 times smaller than the block's largest divide by eps."""
    (param,) = with_gradient((64, 64))
    before = param.detach().clone()
    optimizer = AdamW8bit([param], lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        param.grad = torch.full((64, 64), 1e-5)
        param.grad[0, 0] = 1.0
        optimizer.step()
    assert (param - before).abs().max() <= 20 * 1e-3 * 1.1


def test_blocks_of_many_parameters_are_updated_together_with_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = ((64, 64), (33, 130), (70, 96), (5, 40, 40), (128, 64))
    together, alone = with_gradient(*shapes), with_gradient(*shapes)
    calls = []
    encode_once = type(SIGNED).encode
    optimizers = [AdamW8bit(together), *(AdamW8bit([param]) for param in alone)]
    for optimizer in optimizers:
        optimizer.step()
    monkeypatch.setattr(type(SIGNED), "encode", lambda self, blocks: calls.append(1) or encode_once(self, blocks))
    optimizers[0].step()
    assert len(calls) == 2, "one call for each of both moments"
    for optimizer in optimizers[1:]:
        optimizer.step()
    for one, two in zip(together, alone, strict=True):
        assert torch.equal(one, two)


def test_what_fills_up_edge_blocks_never_changes_a_scale() -> None:
    """The signed map's code 0 is -1 times the scale: decoded padding must not count as a largest magnitude."""
    (param,) = with_gradient((33, 130))
    optimizer = AdamW8bit([param], betas=(0.5, 0.999))
    optimizer.step()
    before = optimizer.state[param]["exp_avg_scales"].clone()
    param.grad *= -0.5  # half of what is kept of the first gradient, the other way: nothing is left
    optimizer.step()
    assert (optimizer.state[param]["exp_avg_scales"] < 0.05 * before).all()
