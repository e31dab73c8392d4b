"""The layout of a program's steps: its units, the places of payloads, and the order of sending.

bml.protocol.step.engine has the dataflow, and says which buffer holds which data.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bml.protocol.step.cuts import Cuts
from bml.protocol.step.dataflow import Buffer, Place, Reduce
from bml.protocol.step.spans import apart, common, merged
from bml.protocol.wire.frame import FrameError, Kind
from bml.schedule import Hop, Phase, Program, Range, Relay


class _Run(NamedTuple):
    """Elements [start, stop) of the vector lie from `place` on."""

    start: int
    stop: int
    place: Place

    def at(self, start: int) -> Place:
        """Where the elements from `start` on lie."""
        return Place(self.place.buffer, self.place.offset + start - self.start)


class _RelayRun(NamedTuple):
    """A run that is passed on."""

    run: _Run
    relay: Relay


class _Part(NamedTuple):
    """A range of the program in elements."""

    start: int
    stop: int
    part: Range


class _Span(NamedTuple):
    """The same, with where its inputs lie: per term, in address order."""

    start: int
    stop: int
    part: Range
    terms: tuple[_Run, ...]


class Out(NamedTuple):
    """A frame that will be sent for a unit, without the fields that all frames of one try share."""

    kind: Kind
    hop: Hop
    place: Place
    priority: int


class _Bundle(NamedTuple):
    """Results that go to one server in one frame, when all of them are final."""

    start: int
    stop: int
    out: Out


class _Outs(NamedTuple):
    """The frames that elements [start, stop) of a result go out in, and the bundles that they are in."""

    start: int
    stop: int
    outs: tuple[Out, ...]
    bundles: tuple[int, ...]


class Unit(NamedTuple):
    """A slice of a range, and its part in the schedule."""

    start: int
    stop: int
    missing: int
    """Elements that children send for it, all together."""
    reduce: Reduce | None
    """How the inputs become the sum of this subtree; None: there is only the contribution."""
    summed: tuple[Out, ...]
    """The frames that go out when the sum is there."""
    is_root: bool
    """The sum is the result."""
    bundles: tuple[int, ...]
    """Those in which it then goes out."""


_REDUCE, _BROADCAST = Kind.REDUCE, Kind.BROADCAST
_MOST_PLACES = 1 << 14


class Layout:
    """What the steps of one program, with vectors of one length, have in common; made once for all of them.

    `n_elements` is the length of the vector, `slice_elements` the size at which this server cuts what it
    sends. Servers may cut differently: a receiver counts elements, not slices.
    """

    def __init__(self, program: Program, n_elements: int, slice_elements: int):
        self.server = program.server
        self.n_elements = n_elements
        self.scratch_elements = 0
        self._cuts = Cuts(program, n_elements, slice_elements)
        self._runs: dict[int, list[_Run]] = {}
        self.relays: dict[tuple[int, int, int], list[_RelayRun]] = {}
        parts = self._in_elements(program)
        self._lay_out(parts, program)
        self._spans = [self._span(part) for part in parts]
        self.bundles: list[_Bundle] = []
        self._bundled: dict[tuple[int, Hop], int] = {}
        self._bundle(program, max(1, slice_elements))
        self.units: list[Unit] = [
            self._unit(start, stop, span) for span in self._spans for start, stop in self._cuts.of(span.part)
        ]
        self.starts = [unit.start for unit in self.units]
        #: Units that need no other server's data, in the order in which they go out.
        self.ready = sorted((unit for unit in self.units if not unit.missing), key=_first_priority)
        self.missing = [unit.missing for unit in self.units]
        self.expected = sum(self.missing) + sum(
            span.stop - span.start for span in self._spans if span.part.broadcast_from is not None
        )
        # Step after step brings the same frames, and each is looked up once.
        self._places: dict[tuple[int, int, int, int, int], Place] = {}
        self._spreads: dict[tuple[int, int], tuple[_Outs, ...]] = {}

    def place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        """Where the payload of a frame belongs; raises FrameError if this server expects no such frame."""
        key = (kind, origin, dest, start, stop)
        known = self._places.get(key)
        if known is None:
            known = self._find_place(kind, origin, dest, start, stop)
            if len(self._places) < _MOST_PLACES:
                self._places[key] = known
        return known

    def priority(self, kind: Kind, start: int) -> int:
        """Earlier slices of all pieces first, and of one slice results before partial sums.

        A result must not wait behind bulk that no server needs yet.
        """
        return 2 * self._cuts.column(start) + (kind == _REDUCE)

    def broadcast(self, start: int, stop: int) -> tuple[_Outs, ...]:
        """The frames that go out when the result of [start, stop) has come from the parent."""
        known = self._spreads.get((start, stop))
        if known is None:
            known = tuple(
                _Outs(a, b, self._spread_part(span, a), self._bundles_of(span))
                for a, b, span in self._overlapping(start, stop)
                if span.part.broadcast_to
            )
            if len(self._spreads) < _MOST_PLACES:
                self._spreads[start, stop] = known
        return known

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int, _Span]]:
        """The parts of [start, stop) that lie in one span each."""
        index = bisect_right(self._spans, start, key=lambda span: span.start) - 1
        while index < len(self._spans) and self._spans[index].start < stop:
            span = self._spans[index]
            yield max(start, span.start), min(stop, span.stop), span
            index += 1

    def _find_place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        if not start < stop <= self.n_elements:
            raise FrameError(f"elements [{start}, {stop}) of {self.n_elements} cannot be sent")
        if dest != self.server:
            passed = (each.run for each in self.relays.get((kind, origin, dest), ()))
            return _find(passed, kind, origin, dest, start, stop)
        if kind == _REDUCE:
            return _find(self._runs.get(origin, ()), kind, origin, dest, start, stop)
        parts = [span.part for _, _, span in self._overlapping(start, stop)]
        if any(part.broadcast_from is None or part.broadcast_from.peer != origin for part in parts):
            raise FrameError(f"server {self.server} expects no result {start}:{stop} from server {origin}")
        return Place(Buffer.OUT, start)

    def _unit(self, start: int, stop: int, span: _Span) -> Unit:
        part, place = span.part, Place(Buffer.OUT, start)
        reduce: Reduce | None = Reduce(start, stop, tuple(term.at(start) for term in span.terms))
        summed, bundles = self._spread_part(span, start), self._bundles_of(span)
        if part.reduce_to is not None:
            if not part.reduce_from:  # a leaf sends its own contribution without a copy
                reduce, place = None, Place(Buffer.IN, start)
            summed, bundles = (Out(_REDUCE, part.reduce_to, place, self.priority(_REDUCE, start)),), ()
        missing = (stop - start) * len(part.reduce_from)
        return Unit(start, stop, missing, reduce, summed, part.reduce_to is None, bundles)

    def _spread_part(self, span: _Span, start: int) -> tuple[Out, ...]:
        hops = [hop for hop in span.part.broadcast_to if (span.start, hop) not in self._bundled]
        return tuple(self._result(hop, start) for hop in hops)

    def _result(self, hop: Hop, start: int) -> Out:
        return Out(_BROADCAST, hop, Place(Buffer.OUT, start), self.priority(_BROADCAST, start))

    def _bundles_of(self, span: _Span) -> tuple[int, ...]:
        numbers = (self._bundled.get((span.start, hop)) for hop in span.part.broadcast_to)
        return tuple(number for number in numbers if number is not None)

    def _bundle(self, program: Program, slice_elements: int) -> None:
        """Bundle results that are no longer than a slice: a frame costs more than to wait for the others."""
        for first, after, hops in program.bundles:
            start, stop = self._cuts.at(first), self._cuts.at(after)
            if not 0 < stop - start <= slice_elements:
                continue
            spans = [span for _, _, span in self._overlapping(start, stop)]
            for hop in hops:
                self._bundled.update({(span.start, hop): len(self.bundles) for span in spans})
                self.bundles.append(_Bundle(start, stop, self._result(hop, start)))

    def _in_elements(self, program: Program) -> list[_Part]:
        """Ranges that tile the vector; one shorter than the number of pieces leaves some of them empty."""
        n = self.n_elements
        cut = [_Part(program.cut(part.start, n), program.cut(part.stop, n), part) for part in program.ranges]
        return [each for each in cut if each.start < each.stop]

    def _lay_out(self, parts: Sequence[_Part], program: Program) -> None:
        """Give places to all payloads; those that a sender may put into one frame get adjacent ones."""
        n = self.n_elements
        gathered: dict[int, list[tuple[int, int]]] = {}
        for start, stop, part in parts:
            for hop in part.reduce_from:
                gathered.setdefault(hop.peer, []).append((start, stop))
        relayed: dict[tuple[int, int, int], list[tuple[int, int, Relay]]] = {}
        for relay in program.relays:
            start, stop = program.cut(relay.start, n), program.cut(relay.stop, n)
            key = (int(_REDUCE if relay.phase == Phase.REDUCE else _BROADCAST), relay.origin, relay.dest)
            if start < stop:
                relayed.setdefault(key, []).append((start, stop, relay))
        summed = merged((start, stop) for start, stop, part in parts if part.reduce_from)
        own = [(child, span) for child, spans in gathered.items() for span in merged(spans)]
        foreign = [
            (key, span) for key, runs in relayed.items() for span in merged((a, b) for a, b, _ in runs)
        ]
        waits = [
            *own,
            *(each for each in foreign if each[0][0] == _REDUCE and not common(summed, (each[1],))),
        ]
        in_out = apart([span for _, span in waits])
        free = {waits[index] for index in in_out}
        for child, span in own:
            self._runs.setdefault(child, []).append(self._place(span, (child, span) in free))
        for key, span in foreign:
            place = self._place(span, key[0] == _BROADCAST or (key, span) in free)
            self.relays.setdefault(key, []).extend(
                _RelayRun(_Run(start, stop, place.at(start)), relay)
                for start, stop, relay in sorted(relayed[key], key=lambda each: each[0])
                if span[0] <= start < span[1]
            )

    def _place(self, span: tuple[int, int], in_out: bool) -> _Run:
        start, stop = span
        if in_out:
            return _Run(start, stop, Place(Buffer.OUT, start))
        run = _Run(start, stop, Place(Buffer.SCRATCH, self.scratch_elements))
        self.scratch_elements += stop - start
        return run

    def _span(self, part: _Part) -> _Span:
        start, stop, what = part
        terms = {self.server: _Run(start, stop, Place(Buffer.IN, start))}
        for child in what.reduce_from:
            runs = self._runs[child.peer]
            terms[child.peer] = runs[bisect_right(runs, start, key=lambda run: run.start) - 1]
        return _Span(start, stop, what, tuple(terms[peer] for peer in sorted(terms)))


def _first_priority(unit: Unit) -> int:
    return min((out.priority for out in unit.summed), default=0)


def _find(runs: Iterable[_Run], kind: int, origin: int, dest: int, start: int, stop: int) -> Place:
    """The place of [start, stop) in runs that, where they are adjacent in the vector, are so in memory."""
    reached: int | None = None
    place: Place | None = None
    for run in runs:
        if place is None and run.start <= start < run.stop:
            place, reached = run.at(start), run.stop
        elif reached is not None and reached < stop and run.start == reached:
            reached = run.stop
    if place is None or reached is None or reached < stop:
        raise FrameError(f"no frame {start}:{stop} of kind {kind} from {origin} to {dest} belongs here")
    return place
