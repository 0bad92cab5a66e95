"""The sweep over shard-group sizes: bytes worked out by hand, layers merged in order."""

from __future__ import annotations

import pytest

from vescale_fsdp.advisor import Split, advise, merge_layers
from vescale_fsdp.shapes import ModelShapes, ShapeGroup, merge_equal
from vescale_fsdp.spec import ParamSpec


def model(*layers: int) -> ModelShapes:
    """A 64-element root and one group per layer, of so many 8-element rows; equal ones are merged."""
    root = ShapeGroup(("root",), (ParamSpec("embed", (64,), "bfloat16"),))
    blocks = [
        ShapeGroup((f"layers.{at}",), (ParamSpec(f"layers.{at}.w", (rows, 8), "bfloat16"),))
        for at, rows in enumerate(layers)
    ]
    return ModelShapes("m", "m", merge_equal([root, *blocks]))


def test_bytes_of_every_split_are_those_of_the_formulas() -> None:
    one, two, four = advise(model(8, 8), 4).splits  # 192 elements, bfloat16
    assert one == Split(1, 4, 1, 0.0, 0.0, 384, 192 * 12, 0, 2 * 3 * 384 // 4)
    assert two == Split(2, 2, 1, 0.0, 0.0, 192, 96 * 12, 192, 192)
    assert four == Split(4, 1, 1, 0.0, 0.0, 96, 48 * 12, 3 * 96, 0)


def test_every_divisor_is_tried_once() -> None:
    assert [split.shard_size for split in advise(model(8), 36).splits] == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_the_knee_is_the_largest_shard_group_within_the_accepted_padding() -> None:
    advice = advise(model(8), 256)  # 64 elements are 8 shares of 16 bytes: no more than 8 ranks get any
    assert advice.knee.shard_size == 8
    assert [split.padding_pct for split in advice.splits[-2:]] == [1500.0, 3100.0]


def test_where_nothing_is_within_it_the_knee_pads_least() -> None:
    advice = advise(model(9), 4, max_padding_pct=-1)
    assert advice.knee.padding_pct == min(split.padding_pct for split in advice.splits)


def test_layers_merge_in_their_order_even_where_kinds_alternate() -> None:
    merged = merge_layers(model(8, 16, 8, 16, 8), 2)
    assert [[spec.fqn for spec in group.specs] for group in merged.groups] == [
        ["embed"],
        ["layers.0.w", "layers.1.w"],
        ["layers.2.w", "layers.3.w"],
        ["layers.4.w"],
    ]


def test_merging_layers_fills_what_one_layer_leaves_empty() -> None:
    merges = advise(model(4, 4, 4, 4, 4, 4, 4, 4), 32).merges
    padding = {merge.layers: merge.padding_pct for merge in merges if merge.shard_size == 32}
    # 4 rows of 8 in 32 shares of 8: 28 are empty; 8 layers are 32 rows. The root pads 192 of its 256 always.
    assert padding == {layers: pytest.approx(100 * (192 + (256 * 8 // layers - 256)) / 320) for layers in (1, 2, 4, 8)}
