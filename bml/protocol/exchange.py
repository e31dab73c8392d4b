"""The dataflow of one step of an exchange on one server: what it has summed so far goes out, round by round.

Same interface as `Engine`, for programs that are no forest. A slice goes through the rounds on its own:

    round r    sum so far sent to the partners of round r; all their sums are in  -->  added in id order
               -- it was the last round                                           -->  final
               -- it was not                                                      -->  round r+1

Memory: IN holds the sum so far of round 0 and OUT that after the last round. In between it has a place of
its own in SCRATCH for every round, as the partners' sums have, because what is being sent must not change.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from bml.protocol.dataflow import Buffer, Dataflow, Instruction, Place, Reduce, Send, Stamp
from bml.protocol.direct import DirectEngine
from bml.protocol.engine import Engine, Layout
from bml.protocol.frame import FrameError, Header, Kind
from bml.schedule import AnyProgram, AnyPrograms, DirectProgram, ExchangeProgram, Hop

_MOST_LAYOUTS = 64
"""How many shapes of vectors are remembered: a training step may reduce many arrays one by one."""


class _Term(NamedTuple):
    """Where one partner's sums lie in SCRATCH, and in which round they come."""

    round: int
    base: int


class ExchangeEngine(Dataflow):
    """The dataflow of one step; see the module's text and `Engine`."""

    def __init__(self, program: ExchangeProgram, stamp: Stamp, n_elements: int, slice_elements: int):
        super().__init__(program.server, stamp, n_elements)
        self._rounds = program.rounds
        self._slice = max(1, slice_elements)
        self._starts = range(0, n_elements, self._slice)
        self._terms: dict[int, _Term] = {}
        self._sums = [self._sum_place(number) for number in range(len(self._rounds) + 1)]
        for number, partners in enumerate(self._rounds):
            for hop in partners:
                self._terms[hop.peer] = _Term(number, self._reserve())
        self._at = [0] * len(self._starts)  # round that each slice is in
        self._missing = [
            [(self._stop(unit) - start) * len(partners) for unit, start in enumerate(self._starts)]
            for partners in self._rounds
        ]
        self.expected = n_elements * len(self._terms)

    def start(self) -> list[Instruction]:
        """What can be done with this server's own contribution alone."""
        done: list[Instruction] = []
        for unit, start in enumerate(self._starts):
            if self._rounds:
                self._send(unit, done)
            else:
                stop = self._stop(unit)
                self._final(start, stop)
                done.append(Reduce(start, stop, (Place(Buffer.IN, start),)))
        return done

    def place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        """Where the payload of a frame belongs; raises FrameError if this server expects no such frame."""
        fits = start < stop <= self.n_elements
        if dest != self.server or kind != Kind.UP or origin not in self._terms or not fits:
            raise FrameError(f"no frame {start}:{stop} of kind {kind} from {origin} to {dest} belongs here")
        return Place(Buffer.SCRATCH, self._terms[origin].base + start)

    def received(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> list[Instruction]:
        """The payload of a frame is in its place; what can be done now."""
        done: list[Instruction] = []
        self.handled += stop - start
        missing = self._missing[self._terms[origin].round]
        unit = bisect_right(self._starts, start) - 1
        while unit < len(self._starts) and self._starts[unit] < stop:
            missing[unit] -= min(stop, self._stop(unit)) - max(start, self._starts[unit])
            self._advance(unit, done)
            unit += 1
        return done

    def _advance(self, unit: int, done: list[Instruction]) -> None:
        """Take a slice through all rounds whose sums are in; a later round's may have come early."""
        while self._at[unit] < len(self._rounds) and not self._missing[self._at[unit]][unit]:
            done.append(self._reduce(unit))
            self._at[unit] += 1
            if self._at[unit] < len(self._rounds):
                self._send(unit, done)
            else:
                self._final(self._starts[unit], self._stop(unit))

    def _reduce(self, unit: int) -> Reduce:
        number, start = self._at[unit], self._starts[unit]
        terms = {hop.peer: self._term(hop, start) for hop in self._rounds[number]}
        terms[self.server] = self._sum(number, start)
        ordered = tuple(terms[peer] for peer in sorted(terms))
        return Reduce(start, self._stop(unit), ordered, self._sum(number + 1, start))

    def _send(self, unit: int, done: list[Instruction]) -> None:
        number, start, stop = self._at[unit], self._starts[unit], self._stop(unit)
        epoch, step, signature, itemsize = self.stamp
        # Earlier slices first, and of one slice later rounds first.
        priority = unit * len(self._rounds) + len(self._rounds) - 1 - number
        for hop in self._rounds[number]:
            nbytes = (stop - start) * itemsize
            header = Header(Kind.UP, epoch, step, self.server, hop.peer, signature, start, stop, nbytes)
            done.append(Send(hop.via, hop.level, header, self._sum(number, start), priority))

    def _stop(self, unit: int) -> int:
        return min(self._starts[unit] + self._slice, self.n_elements)

    def _term(self, hop: Hop, start: int) -> Place:
        return Place(Buffer.SCRATCH, self._terms[hop.peer].base + start)

    def _sum(self, number: int, start: int) -> Place:
        """Where the sum before round `number` lies."""
        buffer, base = self._sums[number]
        return Place(buffer, base + start)

    def _sum_place(self, number: int) -> Place:
        if number == 0:
            return Place(Buffer.IN, 0)
        if number == len(self._rounds):
            return Place(Buffer.OUT, 0)
        return Place(Buffer.SCRATCH, self._reserve())

    def _reserve(self) -> int:
        base = self.scratch_elements
        self.scratch_elements += self.n_elements
        return base


AnyEngine = Engine | ExchangeEngine | DirectEngine


class Engines:
    """Makes the engines of a view, step after step, and keeps what steps of one shape have in common."""

    def __init__(self, programs: AnyPrograms):
        self.programs = programs
        self._layouts: dict[tuple[int, int, int], Layout] = {}

    def engine(self, stamp: Stamp, n_elements: int, slice_elements: int) -> AnyEngine:
        """The engine of one try of one step; arguments as of `Layout`."""
        program = self.programs.for_nbytes(n_elements * stamp.itemsize)
        if isinstance(program, ExchangeProgram | DirectProgram):
            return engine_for(program, stamp, n_elements, slice_elements)
        key = (n_elements, slice_elements, stamp.itemsize)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            layout = self._layouts[key] = Layout(program, n_elements, slice_elements)
        return Engine(program, stamp, n_elements, slice_elements, layout)


def engine_for(program: AnyProgram, stamp: Stamp, n_elements: int, slice_elements: int) -> AnyEngine:
    """Make the engine that runs a program once: of trees, of an exchange, or over shared memory."""
    if isinstance(program, DirectProgram):
        return DirectEngine(program, stamp, n_elements)
    if isinstance(program, ExchangeProgram):
        return ExchangeEngine(program, stamp, n_elements, slice_elements)
    return Engine(program, stamp, n_elements, slice_elements)
