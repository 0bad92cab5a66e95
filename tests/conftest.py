"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
