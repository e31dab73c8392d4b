"""Spans against sets of integers."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bml.protocol.step.spans import Spans, common, merged, missing, placed, runs, size

N = 24
SPANS = st.lists(st.tuples(st.integers(0, N), st.integers(0, N)), max_size=6)


def elements(spans: Spans | list[tuple[int, int]]) -> set[int]:
    return {element for start, stop in spans for element in range(start, stop)}


@given(SPANS)
def test_merged_is_the_same_set_in_fewest_spans(spans: list[tuple[int, int]]) -> None:
    found = merged(spans)
    assert elements(found) == elements(spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    assert size(found) == len(elements(spans))


@given(SPANS, SPANS)
def test_common_and_missing(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert elements(common(merged(a), merged(b))) == elements(a) & elements(b)
    assert elements(missing(merged(a), N)) == set(range(N)) - elements(a)


@given(SPANS, st.integers(0, N), st.integers(0, N))
def test_runs_tell_of_every_element_which_spans_have_it(spans: list[tuple[int, int]], a: int, b: int) -> None:
    start, stop = min(a, b), max(a, b)
    found = list(runs(spans, start, stop))
    told = {element: numbers for low, high, numbers in found for element in range(low, high)}
    assert list(told) == list(range(start, stop))
    for element, numbers in told.items():
        assert numbers == [number for number, (low, high) in enumerate(spans) if low <= element < high]


@given(SPANS, SPANS)
def test_placed_finds_the_elements_again(spans: list[tuple[int, int]], local: list[tuple[int, int]]) -> None:
    left = merged(spans)
    order = sorted(elements(left))
    inside = [(min(a, len(order)), min(b, len(order))) for a, b in local]
    assert elements(placed(inside, left)) == {order[index] for index in elements(inside)}
