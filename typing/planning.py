"""A user's planning program: shapes, wishes, a plan, advice, pictures. Checked by mypy --strict, never run."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from vescale_fsdp.advisor import Advice, Split, advise
from vescale_fsdp.model_plan import ModelPlan, plan_model
from vescale_fsdp.picture import draw_advice, draw_plan
from vescale_fsdp.plan import GroupPlan, Span
from vescale_fsdp.planner import plan_group
from vescale_fsdp.shapes import ModelShapes, ShapeGroup, from_module, group_by_block, read_shapes, to_json
from vescale_fsdp.spec import ParamSpec
from vescale_fsdp.wishes import grant, parse_wish


def shapes_of(module: nn.Module) -> ModelShapes:
    shapes: ModelShapes = from_module(module, model="mine").split_dtypes()
    groups: tuple[ShapeGroup, ...] = group_by_block(tuple(shapes.specs), ["layers.*"])
    return shapes.with_groups(groups).with_dtype("bfloat16")


def plan_file(source: Path, num_ranks: int) -> ModelPlan:
    shapes = read_shapes(str(source), dtype="bfloat16", group_by=("layers.*",))
    wished = grant(shapes, [parse_wish("rows", "16"), parse_wish("block", "layers.*.w1=128x128")])
    plan: ModelPlan = plan_model(wished, num_ranks, max_lanes=2)
    padding: float = plan.padding_pct
    proved: bool = plan.proved
    print(padding, proved, plan.nbytes, plan.explain(), plan.to_json(), to_json(shapes))
    draw_plan(plan, Path("plan.png"))
    return plan


def where(plan: ModelPlan, rank: int) -> list[Span]:
    group: GroupPlan = plan.groups[0].plan
    return [group.shard_range(tensor.spec.fqn, rank) for tensor in group.tensors]


def knee(shapes: ModelShapes) -> int:
    advice: Advice = advise(shapes, 1536, max_padding_pct=5.0, bytes_of_state=6)
    draw_advice(advice, Path("advice.png"))
    best: Split = advice.knee
    return best.shard_size


def one_group() -> int:
    return plan_group([ParamSpec("w", (6, 8), "bfloat16")], 4, name="layer", max_lanes=1).share
