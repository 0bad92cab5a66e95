"""Granularity: wishes combine by least common multiple and keep who asked."""

from __future__ import annotations

import pytest

from ragged_dtensor.granularity import ELEMENT, Granularity


def test_wishes_combine_by_lcm_and_keep_both_reasons() -> None:
    one, two = Granularity(4, ("rows (a)",)), Granularity(6, ("blocks (b)",))
    assert one & two == Granularity(12, ("rows (a)", "blocks (b)"))


def test_the_same_reason_is_kept_once() -> None:
    wish = Granularity(4, ("rows (a)",))
    assert wish & wish == wish


def test_an_element_adds_nothing() -> None:
    wish = Granularity(4, ("rows (a)",))
    assert ELEMENT & wish == wish == wish & ELEMENT


def test_a_run_has_at_least_one_element() -> None:
    with pytest.raises(ValueError, match="expected >= 1, got 0"):
        Granularity(0)
