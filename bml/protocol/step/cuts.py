"""Where the pieces of a vector are cut into slices, and which slices go first. Pure.

All pieces advance side by side: slice j of every piece goes before slice j+1 of any. So a piece that is
longer than a slice is cut by itself, even if a server plays the same part in its neighbours. The first and
the last slices of a long piece are shorter than the others: a server may have to wait for the first results,
and nothing else is left to fill the wires while the last ones pass through the servers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from bml.schedule import Program, Range

_LONG = 8
"""Slices of a piece from which on the shorter ones at its ends cost little."""
_HALVINGS = 3
_FINENESS = 1 << _HALVINGS


class Cuts:
    """Those of a program's pieces in a vector of `n_elements`, into slices of at most `slice_elements`."""

    def __init__(self, program: Program, n_elements: int, slice_elements: int):
        self._program = program
        self._n_elements = n_elements
        self._slice = max(1, slice_elements)
        weights = program.cumulative or range(program.pieces + 1)
        heaviest = max(after - before for before, after in pairwise(weights))
        self._columns = _FINENESS * max(1, -(-n_elements * heaviest // (weights[-1] * self._slice)))

    def at(self, piece: int) -> int:
        """Where a piece begins, in elements."""
        return self._program.cut(piece, self._n_elements)

    def of(self, part: Range) -> Iterator[tuple[int, int]]:
        """The slices, (start, stop) in elements, that a range of pieces is cut into; none is empty."""
        start = self.at(part.start)  # of the short pieces that go together
        for piece in range(part.start, part.stop):
            low, high = self.at(piece), self.at(piece + 1)
            if high - start <= self._slice:
                continue
            if start < low:
                yield start, low
            start = low
            if high - low > self._slice:
                yield from pairwise(self._edges(low, high))
                start = high
        if start < self.at(part.stop):
            yield start, self.at(part.stop)

    def column(self, start: int) -> int:
        """How far into its piece an element lies, in eighths of a slice of the longest; less goes first."""
        piece = bisect_right(range(self._program.pieces), start, key=self.at) - 1
        low, high = self.at(piece), self.at(piece + 1)
        return ((start - low) * self._columns * 2 + high - low) // (2 * (high - low))

    def _edges(self, low: int, high: int) -> list[int]:
        """Where the slices of a piece begin, and its end."""
        count = -(-(high - low) // self._slice)
        edges = [low + (high - low) * index // count for index in range(count + 1)]
        if count >= _LONG:
            shorter = [edges[1] - low >> halvings for halvings in range(_HALVINGS, 0, -1)]
            edges[1:1] = [low + length for length in shorter]
            edges[-1:-1] = [high - length for length in reversed(shorter)]
            edges = list(dict.fromkeys(edges))
        return edges
