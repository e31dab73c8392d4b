"""Sets of elements of a vector, as sorted spans (start, stop) that do not overlap or touch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

Spans = tuple[tuple[int, int], ...]


def merged(spans: Iterable[tuple[int, int]]) -> Spans:
    """The same elements, as few spans."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def common(a: Spans, b: Spans) -> Spans:
    """The elements that are in both."""
    found: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def missing(spans: Spans, n_elements: int) -> Spans:
    """The elements of 0 .. n_elements-1 that are not in them."""
    edges = [0, *(edge for span in spans for edge in span), n_elements]
    return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop)


def runs(filled: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int, list[int]]]:
    """Cut [start, stop) where any of these spans begin or end.

    Yields (start, stop, numbers), where `numbers` are those of the spans that have these elements. Unlike
    elsewhere here the spans may overlap.
    """
    edges = {start, stop, *(edge for span in filled for edge in span if start < edge < stop)}
    for a, b in pairwise(sorted(edges)):
        yield a, b, [number for number, (low, high) in enumerate(filled) if low <= a and b <= high]


def size(spans: Iterable[tuple[int, int]]) -> int:
    """How many elements they are."""
    return sum(stop - start for start, stop in spans)


def placed(local: Iterable[tuple[int, int]], left: Spans) -> Spans:
    """Where spans of a vector that holds only the elements `left`, closed up, lie in the whole one."""
    found: list[tuple[int, int]] = []
    pieces = merged(local)
    base = 0
    for start, stop in left:
        for a, b in common(pieces, ((base, base + stop - start),)):
            found.append((start + a - base, start + b - base))
        base += stop - start
    return merged(found)


def apart(spans: Sequence[tuple[int, int]]) -> set[int]:
    """Indices of those of any spans that do not overlap one another and are longest together.

    Weighted interval scheduling, O(m log m) for m spans.
    """
    order = sorted(range(len(spans)), key=lambda index: spans[index][1])
    stops = [spans[index][1] for index in order]
    # best[i]: greatest length of a choice among the first i; before[i]: how many end before i starts.
    best, before = [0], []
    for i, index in enumerate(order):
        start, stop = spans[index]
        before.append(bisect_right(stops, start, 0, i))
        best.append(max(best[i], best[before[i]] + stop - start))
    chosen: set[int] = set()
    i = len(order)
    while i:
        if best[i] == best[i - 1]:
            i -= 1
        else:
            chosen.add(order[i - 1])
            i = before[i - 1]
    return chosen
