"""Wishes: names that plugins registered, what they add up to, and what is said when something is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest
import torch

from ragged_dtensor.granularity import ELEMENT
from vescale_fsdp import plugins
from vescale_fsdp.errors import PlanError, PluginError
from vescale_fsdp.formats.block_format import BlockFormat
from vescale_fsdp.hookspecs import LayoutConstraint, hookimpl
from vescale_fsdp.plugins import Registry, granularity_of
from vescale_fsdp.policy import ParamPolicy


@dataclass(frozen=True)
class Halves:
    """A format of 2x4 blocks, half a byte each."""

    name: str = "halves"
    block_shape: tuple[int, ...] = (2, 4)
    bits: int = 4
    scale_dtype: torch.dtype = torch.float32

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class ThreeRows:
    name: str = "three"

    def numel(self, shape: tuple[int, ...], size: tuple[int, ...]) -> int:
        return 3 * shape[1]


class Plugin:
    def __init__(self, formats: Iterable[object] = (), constraints: Iterable[object] = ()) -> None:
        self.formats, self.constraints = formats, constraints

    @hookimpl
    def vescale_block_formats(self) -> Iterable[BlockFormat]:
        return self.formats  # type: ignore[return-value]  # tests pass wrong ones on purpose

    @hookimpl
    def vescale_layout_constraints(self) -> Iterable[LayoutConstraint]:
        return self.constraints  # type: ignore[return-value]  # tests pass wrong ones on purpose


@pytest.fixture
def registry() -> Registry:
    made = Registry()
    made.register(Plugin([Halves()], [ThreeRows()]), distribution="vescale-test")
    return made


def test_wishes_combine_by_lcm_and_keep_who_asked(registry: Registry) -> None:
    policy = ParamPolicy(format="halves", optimizer="three", granularity="rows:4")
    asked = registry.granularity_of("w1", (120, 8), policy)
    assert asked.numel == 12 * 8
    assert asked.reasons == (
        "2 rows (halves by vescale-test)",
        "3 rows (three by vescale-test)",
        "4 rows (rows:4 by vescale-fsdp)",
    )


def test_a_tensor_parallel_stride_is_one_more_reason(registry: Registry) -> None:
    asked = registry.granularity_of("w1", (120, 8), ParamPolicy(format="halves"), stride=24)
    assert (asked.numel, asked.reasons[1]) == (48, "3 rows (tensor-parallel stride)")


def test_the_state_format_counts_as_well(registry: Registry) -> None:
    assert registry.granularity_of("w1", (120, 8), ParamPolicy(state_format="halves")).numel == 16
    assert registry.unit_bits(ParamPolicy(state_format="halves")) == (4,)


def test_no_wish_is_element_granularity() -> None:
    assert granularity_of("w", (4, 4), None) == ELEMENT
    assert granularity_of("w", (4, 4), ParamPolicy()) == ELEMENT


@pytest.mark.parametrize(
    ("wish", "shape", "numel", "size"),
    [
        ("rows", (4096, 512), 512, "1 row"),
        ("rows:32", (4096, 512), 32 * 512, "32 rows"),
        ("rows:32", (4096,), 32, "32 elements"),
        ("rows:32", (64, 3, 7, 7), 32 * 147, "32 rows"),
        ("rows:32", (8, 96, 64), 32 * 64, "32 rows"),
        ("rows:32", (8, 100, 64), 6400, "1 expert"),  # 100 rows: a run of 32 would straddle two experts
        ("blocks", (4096, 512), 128 * 512, "128 rows"),
        ("blocks:16x16", (8, 96, 64), 16 * 64, "16 rows"),
        ("whole", (8, 96, 64), 8 * 96 * 64, "whole"),
        ("muon", (96, 64), 96 * 64, "whole"),
        ("muon", (8, 96, 64), 96 * 64, "1 expert"),
        (7, (64,), 7, "7 elements"),
    ],
)
def test_built_in_constraints(wish: str | int, shape: tuple[int, ...], numel: int, size: str) -> None:
    asked = granularity_of("w", shape, ParamPolicy(granularity=wish))
    by = "asked for as a number" if isinstance(wish, int) else f"{wish} by vescale-fsdp"
    assert (asked.numel, asked.reasons) == (numel, (f"{size} ({by})",))


def test_what_asks_for_single_elements_leaves_no_reason() -> None:
    for wish, shape in (("rows", (64,)), ("blocks", (64,)), ("whole", (0, 5)), ("rows:4", ())):
        assert granularity_of("w", shape, ParamPolicy(granularity=wish)) == ELEMENT


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ("rows:0", "layers.0.w1: 'rows:0' of vescale-fsdp: .* such as 'rows:1', got sizes"),
        ("blocks:3", "such as 'blocks:128x128', got sizes"),
        ("whole:2", "such as 'whole', got sizes"),
        ("rows:many", "layers.0.w1: 'rows:many' of vescale-fsdp: invalid literal"),
        ("columns", "no layout constraint is named 'columns'; there are .*'rows'"),
    ],
)
def test_a_wish_that_means_nothing_says_what_would(wish: str, message: str) -> None:
    with pytest.raises((PlanError, PluginError), match=message):
        granularity_of("layers.0.w1", (4, 4), ParamPolicy(granularity=wish))


@pytest.mark.parametrize("field", ["format", "state_format", "optimizer", "granularity"])
def test_a_policy_refuses_values_of_no_use(field: str) -> None:
    with pytest.raises(PlanError, match=f"ParamPolicy.{field} is "):
        ParamPolicy(**{field: ""})


def test_a_name_belongs_to_one_distribution(registry: Registry) -> None:
    with pytest.raises(PluginError, match="'halves' is registered twice, by vescale-test and by vescale-other"):
        registry.register(Plugin([Halves()]), distribution="vescale-other")
    assert registry.formats["halves"].distribution == "vescale-test"
    assert len(registry.constraints) == 5


def test_a_hook_that_fails_is_named_with_its_distribution(registry: Registry) -> None:
    def failing() -> Iterator[object]:
        raise RuntimeError("no GPU")
        yield

    with pytest.raises(PluginError, match="of vescale-bad: vescale_block_formats failed: RuntimeError"):
        registry.register(Plugin(failing()), distribution="vescale-bad")
    assert list(registry.formats) == ["halves"]


def test_a_hook_that_gives_something_else_is_named(registry: Registry) -> None:
    with pytest.raises(PluginError, match="vescale-bad: vescale_layout_constraints gave 'rows'"):
        registry.register(Plugin(constraints=["rows"]), distribution="vescale-bad")


def test_a_hook_that_does_not_exist_or_has_arguments_is_refused(registry: Registry) -> None:
    class Misspelt:
        @hookimpl
        def vescale_block_format(self) -> list[object]:
            return []

    class Arguments:
        @hookimpl
        def vescale_block_formats(self, shape: object) -> list[object]:
            return []

    with pytest.raises(PluginError, match=r"(?s)plugin of vescale-bad: .*vescale_block_format"):
        registry.register(Misspelt(), distribution="vescale-bad")
    with pytest.raises(PluginError, match=r"(?s)plugin of vescale-bad: .*shape"):
        registry.register(Arguments(), distribution="vescale-bad")
    registry.register(Plugin([Halves("third")]), distribution="vescale-good")
    assert sorted(registry.formats) == ["halves", "third"]


def test_a_plugin_can_be_taken_back(registry: Registry) -> None:
    plugin = Plugin([Halves("third")])
    registry.register(plugin)
    registry.unregister(plugin)
    with pytest.raises(PluginError, match=r"no block format is named 'third'; there are \['halves'\]"):
        registry.format("third")


def entry_point(folder: Path, distribution: str, value: str) -> EntryPoint:
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vescale_fsdp]\nformats = {value}\n")
    (point,) = Distribution.at(info).entry_points
    return point


def test_a_distribution_is_found_by_its_entry_point(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quarters_plugin.py").write_text(
        "from vescale_fsdp.hookspecs import hookimpl\n"
        "class Quarters:\n    name = 'quarters'\n"
        "    def numel(self, shape, size):\n        return 4\n"
        "@hookimpl\ndef vescale_layout_constraints():\n    return [Quarters()]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.load([entry_point(tmp_path, "vescale-quarters", "quarters_plugin")])
    asked = registry.granularity_of("w", (64,), ParamPolicy(optimizer="quarters"))
    assert asked.reasons == ("4 elements (quarters by vescale-quarters)",)


def test_a_broken_distribution_is_reported_and_named_when_something_is_missing(
    registry: Registry, tmp_path: Path
) -> None:
    points = [entry_point(tmp_path, "vescale-gone", "no_such_module"), entry_point(tmp_path, "vescale-odd", "math:pi")]
    with pytest.warns(UserWarning, match="plugin of vescale-gone: no_such_module cannot be imported"):
        registry.load(points[:1])
    with pytest.raises(PluginError, match=r"no block format is named 'gone'.* Broken: plugin of vescale-gone"):
        registry.format("gone")
    assert registry.format("halves").name == "halves"


def test_the_process_has_one_registry_that_programs_may_add_to() -> None:
    plugin = Plugin([Halves("mine")])
    plugins.register(plugin)
    try:
        assert granularity_of("w", (4, 8), ParamPolicy(format="mine")).reasons == ("2 rows (mine by this program)",)
    finally:
        plugins.unregister(plugin)
    with pytest.raises(PluginError, match="no block format is named 'mine'"):
        granularity_of("w", (4, 8), ParamPolicy(format="mine"))
