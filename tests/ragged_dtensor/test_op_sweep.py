"""Every op that torch knows, on ragged tensors: the unsharded result or a RaggedShardError, never a wrong one."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ragged_oracle import held
from ranks import ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ragged_dtensor import RaggedShard, RaggedShardError

SHAPE = (6, 4)
DTYPES = [torch.float32, torch.int64, torch.bool]


def aten_ops() -> Iterator[Any]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::"):
            try:
                yield getattr(getattr(torch.ops.aten, packet), overload or "default")
            except (AttributeError, RuntimeError):  # registered, but not callable from Python
                continue


def is_elementwise_by_tag(op: Any) -> bool:
    name = op._schema.name
    return torch.Tag.pointwise in op.tags or (
        name.startswith("aten::_foreach_") and not op._overloadname.endswith("out")
    )


# Ops that crash, write files, need another backend or make tensors from nothing: not even the plain call is wanted.
SKIPPED = re.compile(
    r"_amp_|_add_batch|_remove_batch|_autocast|_backward_hook|_batch_norm|_coalesced|_conj|"
    r"_convert_weight|_cslt|_cuda|_dim_arange|_dyn_quant|_efficient|_flash|_foobar|_fused_sdp|"
    r"_fw_primal|_has_|_indices|_linalg|_make_|_nested|_propagate|_resize_output|_reshape_alias|_rnn|"
    r"_saturate|_scaled|_shape_as|_sobol|_spdiags|_test_|_thnn|_transform_bias|_use_cudnn|_validate|"
    r"_values|_version|_weight_int|align|argsort\.stable_out|backward\.def|batch_norm|choose_qparams|"
    r"col_ind|crow|ccol|ctc|cudnn|data\.def|empty_quant|fbgemm|from_file|functorch|miopen|mkl|nccl|"
    r"pin_memory|prepacked|quantized|record_stream|rename|requires_grad_|retain_grad|row_ind|"
    r"segment_reduce|set_data|sleep|sparse|sym_|vulkan|xnnpack"
)


def sampled(op: Any, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]] | None:
    """Arguments by the types in the op's schema, those with defaults left out; None if a type has no sample."""
    generator = torch.Generator().manual_seed(0)

    def tensor() -> torch.Tensor:
        values = torch.rand(SHAPE, generator=generator) * 0.8 + 0.1
        return values > 0.5 if dtype is torch.bool else (values if dtype.is_floating_point else values * 10).to(dtype)

    samples: dict[str, Callable[[], Any]] = {
        "Tensor": tensor,
        "Optional[Tensor]": tensor,
        "List[Tensor]": lambda: [tensor(), tensor()],
        "number": lambda: 0.5 if dtype.is_floating_point else 2,
        "float": lambda: 0.5,
        "int": lambda: 1,
        "SymInt": lambda: 1,
        "bool": lambda: False,
        "str": lambda: "none",
        "List[int]": lambda: [1],
        "List[SymInt]": lambda: [1],
        "Optional[List[int]]": lambda: [1],
        "List[number]": lambda: [0.5, 0.25],
    }
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or (argument.kwarg_only and kind.startswith("Optional")):
            continue
        if kind not in samples:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = samples[kind]()
        else:
            args.append(samples[kind]())
    return args, kwargs


def mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, function, value)


def unsharded(op: Any) -> tuple[torch.dtype, Any, Any] | None:
    """The first dtype that the op takes, its result, and its arguments afterwards."""
    for dtype in DTYPES:
        arguments = sampled(op, dtype)
        if arguments is None or not any(isinstance(leaf, torch.Tensor) for leaf in leaves(arguments)):
            return None
        torch.manual_seed(0)
        try:
            return dtype, op(*arguments[0], **arguments[1]), arguments
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
    return None


def leaves(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


def difference(found: Any, expected: Any, mesh: DeviceMesh) -> str | None:
    """Why `found` is not this rank's view of `expected`; None if it is."""
    ours, theirs = leaves(found), leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results for {len(theirs)}"
    for mine, other in zip(ours, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            if mine != other and not (mine != mine and other != other):
                return f"{mine} for {other}"
            continue
        if not isinstance(mine, DTensor):
            return f"{type(mine)} for a tensor"
        local = mine.full_tensor() if any(p.is_partial() for p in mine.placements) else mine.to_local()
        part = other if any(p.is_partial() for p in mine.placements) else part_of(other, mine, mesh)
        if (
            mine.shape != other.shape
            or mine.dtype != other.dtype
            or local.dtype != part.dtype
            or local.shape != part.shape
        ):
            return f"{mine.shape} {mine.dtype}, locally {local.shape} {local.dtype}, for {other.shape} {other.dtype}"
        if not torch.allclose(local.to(torch.complex128), part.to(torch.complex128), atol=1e-6, equal_nan=True):
            return "other values"
    return None


def part_of(full: torch.Tensor, placed: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    return held(full.contiguous(), placed.placements, tuple(mesh.shape), mesh.get_coordinate() or ())


def verdict(op: Any, placement: Placement, mesh: DeviceMesh) -> str:
    """ "untried", "right", "refused", or what is wrong."""
    reference = unsharded(op)
    if reference is None:
        return "untried"
    dtype, expected, expected_arguments = reference
    args, kwargs = mapped(sampled(op, dtype), lambda t: distribute_tensor(t, mesh, [placement], src_data_rank=None))
    torch.manual_seed(0)
    try:
        result = op(*args, **kwargs)
    except RaggedShardError:
        return "refused"
    except RuntimeError as error:  # a composite op that makes plain tensors; torch refuses to mix them with DTensors
        return "refused" if "mixed torch.Tensor and DTensor" in str(error) else f"{op}: {error!r}"
    if "empty" in op._schema.name:
        return "right"
    found = difference(result, expected, mesh) or difference([args, kwargs], list(expected_arguments), mesh)
    return f"{op}: {found}" if found else "right"


def sweep(choose: Callable[[Any], bool]) -> dict[str, list[str]]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = [RaggedShard((0, 1), (5, 7)), RaggedShard((0,), (0, 1)), RaggedShard((0,), (1, 2))]
    verdicts: dict[str, list[str]] = {}
    for index, op in enumerate(op for op in aten_ops() if choose(op)):
        if not SKIPPED.search(str(op)):
            verdicts.setdefault(verdict(op, placements[index % 3], mesh), []).append(str(op))
    wrong = sorted(set(verdicts) - {"right", "refused", "untried"})
    assert not wrong, "\n".join(wrong)
    return verdicts


# Tagged as pointwise, and refused: torch loses the result of a shift, and rrelu draws random numbers.
REFUSED = {"aten.__lshift__.Scalar", "aten.__lshift__.Tensor", "aten.__rshift__.Scalar", "aten.__rshift__.Tensor"}
REFUSED |= {"aten.rrelu.default", "aten._foreach_powsum.Scalar"}


@ranks(2, timeout_s=600)
def test_every_elementwise_op_is_right() -> None:
    verdicts = sweep(is_elementwise_by_tag)
    assert not set(verdicts["refused"]) ^ REFUSED, set(verdicts["refused"]) ^ REFUSED
    assert len(verdicts["right"]) > 500


@pytest.mark.exhaustive
@ranks(2, timeout_s=1200)
def test_every_op_is_right_or_refused() -> None:
    verdicts = sweep(lambda op: not is_elementwise_by_tag(op))
    assert len(verdicts["right"]) > 300
    assert len(verdicts["refused"]) > 300
