"""Pieces and boxes, in integers, against slicing a tensor."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragged_dtensor import LayoutError, Units, layout
from ragged_dtensor.layout import Piece, chunk_range, flat_boxes

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_cover_a_flat_range_once_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin, end = sorted(data.draw(st.lists(st.integers(0, numel), min_size=2, max_size=2)))
    full = torch.arange(numel).view(shape)
    boxes = list(flat_boxes(shape, begin, end))
    parts = [full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] for offsets, sizes, _ in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.long), *(p.flatten() for p in parts)]).tolist() == list(
        range(begin, end)
    )
    assert [start for *_, start in boxes] == [int(part.flatten()[0]) - begin for part in parts]
    assert len(boxes) <= 2 * len(shape) - 1


def test_the_drawing_of_the_module_is_what_the_code_gives() -> None:
    second = Piece.whole((3, 4)).cut(2, Units((5, 7)), 1)
    assert [(box.offsets, box.sizes, box.start) for box in second.boxes()] == [((1, 1), (1, 3), 0), ((2, 0), (1, 4), 3)]
    assert doctest.testmod(layout).failed == 0


@given(st.integers(0, 20), st.integers(1, 6))
def test_chunks_are_those_of_torch_chunk(size: int, num_chunks: int) -> None:
    sizes = [end - begin for begin, end in (chunk_range(size, num_chunks, i) for i in range(num_chunks))]
    torch_sizes = [len(chunk) for chunk in torch.arange(size).chunk(num_chunks)] if size else []
    assert sizes == torch_sizes + [0] * (num_chunks - len(torch_sizes))


def test_a_tensor_without_elements_takes_any_units() -> None:
    for shape in ((0, 3), (3, 0)):
        assert [Piece.whole(shape).cut(1, Units((2, 5)), rank).local_shape[0] for rank in range(2)] == [0, 0]


def test_units_that_do_not_divide_the_rows_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"4 rows do not split into 3 units \(local_units=\(1, 2\)\)"):
        Piece.whole((4, 2)).cut(1, Units((1, 2)), 0)


def test_a_nested_cut_needs_at_least_the_dims_of_the_outer_one() -> None:
    outer = Piece.whole((4, 6)).cut(2, Units((1, 1)), 1)
    assert outer.cut(2, Units((1, 2)), 1).local_shape == (8,)
    with pytest.raises(LayoutError, match="cannot follow one of 2 leading dims"):
        outer.cut(1, Units((1, 1)), 0)


def test_a_chunk_of_a_dim_that_is_already_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match="Use StridedRaggedShard"):
        Piece.whole((4, 6)).cut(1, Units((1, 1)), 1).chunk(0, 2, 0)
