"""The dataflow of one step on one server: which slice is ready, to be added, sent on or final.

There is no barrier between stages: a slice goes on as soon as its inputs are there, so the reduction
of later slices overlaps the broadcast of earlier ones. The engine moves no bytes. It says where a
frame's payload belongs (`place`) and what to do when it is there (`received`); a `Workspace` and a
transport, real or simulated, do it.

State of a unit (a slice of a range):

    waiting   partial sums of children are missing           -- last one arrives -->  summed
    summed    the sum of my subtree is in OUT                 -- I am the root    -->  final
                                                              -- sent up, the result arrives --> final
    final     the result is in OUT and was passed on to `spread`

All units final: complete. Memory: IN is only read, results and partial sums share OUT (a unit's
result can only arrive after its partial sum has left), partial sums of children have places of their
own in SCRATCH, with BML on a healthy fabric of N servers together P - P/N (and rounding).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from bml.protocol.frame import FrameError, Header, Kind
from bml.schedule import Hop, Phase, Program, Range, Relay


class Buffer(IntEnum):
    """The three buffers of a step, and that of the training state which travels to a joiner (in bytes)."""

    IN = 0
    OUT = 1
    SCRATCH = 2
    STATE = 3


class Place(NamedTuple):
    """A position in a buffer, in elements."""

    buffer: Buffer
    offset: int


class Send(NamedTuple):
    """Send a frame to the next server on its way; its payload is found at `place` (None: it has none)."""

    peer: int
    level: int
    header: Header
    place: Place | None
    priority: int


class Stamp(NamedTuple):
    """What all frames of one try of one step have in common."""

    epoch: int
    step: int
    signature: int
    itemsize: int


class Reduce(NamedTuple):
    """OUT[start:stop] = sum of the places, added in this order (address order of their servers).

    `into` is where the sum goes instead, if not there.
    """

    start: int
    stop: int
    terms: tuple[Place, ...]
    into: Place | None = None


class _Run(NamedTuple):
    """Elements [start, stop) of the vector lie in SCRATCH at `base`."""

    start: int
    stop: int
    base: int


class _RelayRun(NamedTuple):
    """A run that is passed on."""

    start: int
    stop: int
    base: int
    relay: Relay


class _Span(NamedTuple):
    """A range of the program in elements, with where its inputs lie."""

    start: int
    stop: int
    part: Range
    shifts: tuple[int | None, ...]  # per term in address order: SCRATCH offset minus start; None = IN


Instruction = Send | Reduce


class Engine:
    """The dataflow of one step; see the module's text. `finals`: the spans that are final, as they became so.

    `stamp` marks all its frames, `n_elements` is the length of the vector, `slice_elements` the size at
    which this server cuts what it sends. Servers may cut differently: a receiver counts elements, not slices.
    """

    def __init__(self, program: Program, stamp: Stamp, n_elements: int, slice_elements: int):
        self.server = program.server
        self.stamp = stamp
        self.n_elements = n_elements
        self.remaining = n_elements
        self.handled = 0
        self.finals: list[tuple[int, int]] = []
        self.expected = 0
        self.scratch_elements = 0
        self._slice = max(1, slice_elements)
        self._runs: dict[int, list[_Run]] = {}
        self._relays: dict[tuple[int, int, int], list[_RelayRun]] = {}
        self._lay_out_relays(program)
        self._spans = self._lay_out_ranges(program)
        self._units: list[tuple[int, int, _Span]] = [
            (start, min(start + self._slice, span.stop), span)
            for span in self._spans
            for start in range(span.start, span.stop, self._slice)
        ]
        self._starts = [start for start, _, _ in self._units]
        self._missing = [(stop - start) * len(span.part.gather) for start, stop, span in self._units]
        self.expected += sum(self._missing) + sum(
            span.stop - span.start for span in self._spans if span.part.down is not None
        )

    @property
    def complete(self) -> bool:
        """Every output is final on this server."""
        return self.remaining == 0

    @property
    def progress(self) -> float:
        """Fraction, 0 to 1, of the elements this server must receive that have arrived."""
        return self.handled / self.expected if self.expected else 1.0

    def start(self) -> Iterator[Instruction]:
        """What can be done with this server's own contribution alone."""
        for unit, missing in enumerate(self._missing):
            if not missing:
                yield from self._summed(unit)

    def place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        """Where the payload of a frame belongs; raises FrameError if this server expects no such frame."""
        if not start < stop <= self.n_elements:
            raise FrameError(f"elements [{start}, {stop}) of {self.n_elements} cannot be sent")
        if dest != self.server:
            return _find(self._relays.get((kind, origin, dest), ()), kind, origin, dest, start, stop)
        if kind == Kind.UP:
            return _find(self._runs.get(origin, ()), kind, origin, dest, start, stop)
        parts = [span.part for _, _, span in self._overlapping(start, stop)]
        if any(part.down is None or part.down.peer != origin for part in parts):
            raise FrameError(f"server {self.server} expects no result {start}:{stop} from server {origin}")
        return Place(Buffer.OUT, start)

    def received(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Iterator[Instruction]:
        """The payload of a frame is in its place; what can be done now."""
        if dest != self.server:
            yield from self._pass_on(kind, origin, dest, start, stop)
            return
        self.handled += stop - start
        if kind == Kind.UP:
            yield from self._add(start, stop)
        else:
            yield from self._spread_result(start, stop)

    # --- what happens to a unit ----------------------------------------------------------------

    def _add(self, start: int, stop: int) -> Iterator[Instruction]:
        unit = bisect_right(self._starts, start) - 1
        while unit < len(self._units) and self._starts[unit] < stop:
            unit_start, unit_stop, _ = self._units[unit]
            self._missing[unit] -= min(stop, unit_stop) - max(start, unit_start)
            if not self._missing[unit]:
                yield from self._summed(unit)
            unit += 1

    def _summed(self, unit: int) -> Iterator[Instruction]:
        start, stop, span = self._units[unit]
        part, place = span.part, Place(Buffer.OUT, start)
        if part.gather or part.up is None:
            yield Reduce(start, stop, tuple(_term(shift, start) for shift in span.shifts))
        else:
            place = Place(Buffer.IN, start)  # a leaf sends its own contribution without a copy
        if part.up is not None:
            yield self._send(Kind.UP, part.up, start, stop, place, span.start)
        else:
            self.remaining -= stop - start
            self.finals.append((start, stop))
            for hop in part.spread:
                yield self._send(Kind.DOWN, hop, start, stop, place, span.start)

    def _spread_result(self, start: int, stop: int) -> Iterator[Instruction]:
        self.remaining -= stop - start
        self.finals.append((start, stop))
        for a, b, span in self._overlapping(start, stop):
            for hop in span.part.spread:
                yield self._send(Kind.DOWN, hop, a, b, Place(Buffer.OUT, a), span.start)

    def _send(self, kind: Kind, hop: Hop, start: int, stop: int, place: Place, span_start: int) -> Send:
        header = self._header(kind, self.server, hop.peer, start, stop)
        return Send(hop.via, hop.level, header, place, self._priority(kind, start - span_start))

    def _pass_on(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Iterator[Send]:
        # What one server sent as one frame may part here: the ways of its pieces differ further on.
        for run in self._relays[kind, origin, dest]:
            a, b = max(start, run.start), min(stop, run.stop)
            if a < b:
                header = self._header(kind, origin, dest, a, b)
                priority = self._priority(kind, a - run.start)
                yield Send(run.relay.via, run.relay.level, header, _at(run, a), priority)

    def _header(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Header:
        epoch, step, signature, itemsize = self.stamp
        return Header(kind, epoch, step, origin, dest, signature, start, stop, (stop - start) * itemsize)

    def _priority(self, kind: Kind, offset: int) -> int:
        # Earlier slices first, and of one slice results before partial sums: a result must not wait
        # behind bulk that nobody needs yet.
        return 2 * (offset // self._slice) + (kind == Kind.UP)

    # --- layout ----------------------------------------------------------------------------------

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, _Span]]:
        """The parts of [start, stop) that lie in one span each."""
        index = bisect_right(self._spans, start, key=lambda span: span.start) - 1
        while index < len(self._spans) and self._spans[index].start < stop:
            span = self._spans[index]
            yield max(start, span.start), min(stop, span.stop), span
            index += 1

    def _lay_out_relays(self, program: Program) -> None:
        # Sorted so that what one frame may bring for adjacent relays lies adjacent in SCRATCH.
        for relay in sorted(program.relays, key=lambda r: (r.phase, r.origin, r.dest, r.start)):
            start, stop = (program.cut(piece, self.n_elements) for piece in (relay.start, relay.stop))
            key = (int(Kind.UP if relay.phase == Phase.UP else Kind.DOWN), relay.origin, relay.dest)
            if start < stop:
                run = self._reserve(start, stop)
                self._relays.setdefault(key, []).append(_RelayRun(*run, relay))

    def _lay_out_ranges(self, program: Program) -> list[_Span]:
        """Spans that tile the vector; what one child sends for adjacent ranges lies adjacent."""
        spans: list[_Span] = []
        for index, part in enumerate(program.ranges):
            start, stop = (program.cut(piece, self.n_elements) for piece in (part.start, part.stop))
            if start == stop:
                continue  # a vector shorter than the number of pieces leaves some of them empty
            shifts: dict[int, int | None] = {self.server: None}
            for child in part.gather:
                shifts[child.peer] = self._shift(child.peer, start, stop, index, program)
            spans.append(_Span(start, stop, part, tuple(shifts[peer] for peer in sorted(shifts))))
        return spans

    def _shift(self, child: int, start: int, stop: int, index: int, program: Program) -> int:
        """SCRATCH offset minus vector offset of what `child` sends for the range at `index`."""
        runs = self._runs.setdefault(child, [])
        if not (runs and runs[-1].stop >= stop):
            runs.append(self._reserve(start, self._run_end(child, index, program)))
        return runs[-1].base - runs[-1].start

    def _run_end(self, child: int, index: int, program: Program) -> int:
        """End, in elements, of the adjacent ranges from `index` on in which `child` is a child."""
        ranges = program.ranges
        while index + 1 < len(ranges) and any(hop.peer == child for hop in ranges[index + 1].gather):
            index += 1
        return program.cut(ranges[index].stop, self.n_elements)

    def _reserve(self, start: int, stop: int) -> _Run:
        run = _Run(start, stop, self.scratch_elements)
        self.scratch_elements += stop - start
        return run


def _at(run: _Run | _RelayRun, start: int) -> Place:
    return Place(Buffer.SCRATCH, run.base + start - run.start)


def _find(
    runs: Sequence[_Run | _RelayRun], kind: int, origin: int, dest: int, start: int, stop: int
) -> Place:
    """The place of [start, stop) in runs that are adjacent in the vector and in SCRATCH."""
    reached: int | None = None
    place: Place | None = None
    for run in runs:
        if place is None and run.start <= start < run.stop:
            place, reached = _at(run, start), run.stop
        elif reached is not None and reached < stop and run.start == reached:
            reached = run.stop
    if place is None or reached is None or reached < stop:
        raise FrameError(f"no frame {start}:{stop} of kind {kind} from {origin} to {dest} belongs here")
    return place


def _term(shift: int | None, start: int) -> Place:
    return Place(Buffer.IN, start) if shift is None else Place(Buffer.SCRATCH, shift + start)
