"""Wrong uses of fully_shard that mypy --strict finds; an ignore that nothing needs is an error itself."""

from torch import nn

from vescale_fsdp import FSDPModule, fully_shard

layer = nn.Linear(4, 4)

fully_shard(layer, 2)  # type: ignore[call-overload]
fully_shard(layer, mesh="cpu")  # type: ignore[call-overload]
fully_shard(layer, ignored_params=["weight"])  # type: ignore[list-item]
fully_shard(layer, reshard_after_forward="no")  # type: ignore[call-overload]
many: list[FSDPModule] = fully_shard(layer)  # type: ignore[assignment]
fully_shard(layer).set_requires_gradient_sync("last")  # type: ignore[arg-type]
fully_shard(layer).unshard(True).wait()  # type: ignore[union-attr]
