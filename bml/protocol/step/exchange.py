"""The dataflow of a direct exchange on one server: its sum so far goes out round by round.

Same interface as `Engine`, for programs that are no forest. A slice goes through the rounds on its own:

    round r    sum so far sent to the partners of round r; all their sums are in  -->  added in id order
               -- it was the last round                                           -->  final
               -- it was not                                                      -->  round r+1

Memory: IN holds the sum so far of round 0 and OUT that after the last round. In between it has a place of
its own in SCRATCH for every round, as the partners' sums have, because data that is being sent must not
change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bml.protocol.step.dataflow import Buffer, Dataflow, Instruction, Place, Reduce, Send, Stamp
from bml.protocol.step.direct import DirectEngine
from bml.protocol.step.engine import Engine
from bml.protocol.step.layout import Layout
from bml.protocol.wire.frame import FrameError, Header, Kind
from bml.schedule import AnyProgram, AnyPrograms, DirectProgram, ExchangeProgram, Hop, Program

_MOST_LAYOUTS = 64
"""How many shapes of vectors are remembered: a training step may reduce many arrays one by one."""


class _Term(NamedTuple):
    """Where one partner's sums lie in SCRATCH, and in which round they come."""

    round: int
    base: int


class _Out(NamedTuple):
    """A frame to a partner of a round, without the fields that all frames of one try share."""

    hop: Hop
    place: Place
    priority: int


class ExchangeLayout:
    """What the steps of one exchange, with vectors of one length, have in common; arguments as of `Layout`.

    Of every slice `starts` and `stops` say where it lies; `missing[r][u]` elements are to come for slice u in
    round r, `outs[r][u]` goes out when the round begins and `reduces[r][u]` ends it.
    """

    def __init__(self, program: ExchangeProgram, n_elements: int, slice_elements: int):
        rounds, length = program.rounds, max(1, slice_elements)
        self.scratch_elements = 0
        self.n_elements = n_elements
        self.starts = range(0, n_elements, length)
        self.stops = [min(start + length, n_elements) for start in self.starts]
        self.terms: dict[int, _Term] = {}
        self._sums = [self._sum_place(number, len(rounds)) for number in range(len(rounds) + 1)]
        for number, partners in enumerate(rounds):
            for hop in partners:
                self.terms[hop.peer] = _Term(number, self._reserve())
        slices = list(enumerate(zip(self.starts, self.stops, strict=True)))
        self.missing = [
            [(stop - start) * len(partners) for _, (start, stop) in slices] for partners in rounds
        ]
        self.outs = [
            [self._outs(partners, number, len(rounds), unit, start) for unit, (start, _) in slices]
            for number, partners in enumerate(rounds)
        ]
        self.reduces = [
            [self._reduce(program, number, start, stop) for _, (start, stop) in slices]
            for number in range(len(rounds))
        ]

    def _outs(
        self, partners: tuple[Hop, ...], number: int, rounds: int, unit: int, start: int
    ) -> tuple[_Out, ...]:
        # Earlier slices first, and of one slice later rounds first.
        priority = unit * rounds + rounds - 1 - number
        return tuple(_Out(hop, self._sum(number, start), priority) for hop in partners)

    def _reduce(self, program: ExchangeProgram, number: int, start: int, stop: int) -> Reduce:
        terms = {
            hop.peer: Place(Buffer.SCRATCH, self.terms[hop.peer].base + start)
            for hop in program.rounds[number]
        }
        terms[program.server] = self._sum(number, start)
        ordered = tuple(terms[peer] for peer in sorted(terms))
        return Reduce(start, stop, ordered, self._sum(number + 1, start))

    def _sum(self, number: int, start: int) -> Place:
        """Where the sum before round `number` lies."""
        buffer, base = self._sums[number]
        return Place(buffer, base + start)

    def _sum_place(self, number: int, rounds: int) -> Place:
        if number == 0:
            return Place(Buffer.IN, 0)
        if number == rounds:
            return Place(Buffer.OUT, 0)
        return Place(Buffer.SCRATCH, self._reserve())

    def _reserve(self) -> int:
        base = self.scratch_elements
        self.scratch_elements += self.n_elements
        return base


class ExchangeEngine(Dataflow):
    """The dataflow of one step; see the module's text and `Engine`."""

    def __init__(
        self,
        program: ExchangeProgram,
        stamp: Stamp,
        n_elements: int,
        slice_elements: int,
        layout: ExchangeLayout | None = None,
    ):
        super().__init__(program.server, stamp, n_elements)
        self._layout = layout = layout or ExchangeLayout(program, n_elements, slice_elements)
        self._rounds = len(program.rounds)
        self._at = [0] * len(layout.starts)  # round that each slice is in
        self._missing = [missing.copy() for missing in layout.missing]
        self.expected = n_elements * len(layout.terms)
        self.scratch_elements = layout.scratch_elements

    def start(self) -> list[Instruction]:
        """Return the instructions that need this server's own contribution alone."""
        done: list[Instruction] = []
        for unit, (start, stop) in enumerate(zip(self._layout.starts, self._layout.stops, strict=True)):
            if self._rounds:
                self._send(unit, done)
            else:
                self._final(start, stop)
                done.append(Reduce(start, stop, (Place(Buffer.IN, start),)))
        return done

    def place(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Place:
        """Where the payload of a frame belongs; raises FrameError if this server expects no such frame."""
        term = self._layout.terms.get(origin)
        if term is None or dest != self.server or kind != Kind.REDUCE or not start < stop <= self.n_elements:
            raise FrameError(f"no frame {start}:{stop} of kind {kind} from {origin} to {dest} belongs here")
        return Place(Buffer.SCRATCH, term.base + start)

    def received(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> list[Instruction]:
        """The payload of a frame is in its place: return the instructions that it makes possible."""
        done: list[Instruction] = []
        self.handled += stop - start
        starts, stops = self._layout.starts, self._layout.stops
        missing = self._missing[self._layout.terms[origin].round]
        unit = start // starts.step
        while unit < len(starts) and starts[unit] < stop:
            missing[unit] -= min(stop, stops[unit]) - max(start, starts[unit])
            self._advance(unit, done)
            unit += 1
        return done

    def _advance(self, unit: int, done: list[Instruction]) -> None:
        """Take a slice through all rounds whose sums are in; a later round's may have come early."""
        at, layout = self._at, self._layout
        while at[unit] < self._rounds and not self._missing[at[unit]][unit]:
            done.append(layout.reduces[at[unit]][unit])
            at[unit] += 1
            if at[unit] < self._rounds:
                self._send(unit, done)
            else:
                self._final(layout.starts[unit], layout.stops[unit])

    def _send(self, unit: int, done: list[Instruction]) -> None:
        epoch, step, signature, itemsize = self.stamp
        start, stop = self._layout.starts[unit], self._layout.stops[unit]
        nbytes = (stop - start) * itemsize
        for hop, place, priority in self._layout.outs[self._at[unit]][unit]:
            header = Header(Kind.REDUCE, epoch, step, self.server, hop.peer, signature, start, stop, nbytes)
            done.append(Send(hop.via, hop.level, header, place, priority))


AnyEngine = Engine | ExchangeEngine | DirectEngine


class Engines:
    """Makes the engines of a view, step after step, and keeps what steps of one shape have in common.

    `slice_nbytes(nbytes)` is the size of the slices, in bytes, of a vector of `nbytes` bytes.
    """

    def __init__(self, programs: AnyPrograms, slice_nbytes: Callable[[int], int]):
        self.programs = programs
        self._slice_nbytes = slice_nbytes
        self._layouts: dict[tuple[int, int, int], Layout | ExchangeLayout] = {}

    def engine(self, stamp: Stamp, n_elements: int) -> AnyEngine:
        """The engine of one try of one step."""
        nbytes = n_elements * stamp.itemsize
        program = self.programs.for_nbytes(nbytes)
        if isinstance(program, DirectProgram):
            return DirectEngine(program, stamp, n_elements)
        slice_elements = max(1, self._slice_nbytes(nbytes) // stamp.itemsize)
        key = (n_elements, slice_elements, stamp.itemsize)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
            layout = self._layouts[key] = _layout(program, n_elements, slice_elements)
        if isinstance(program, ExchangeProgram):
            assert isinstance(layout, ExchangeLayout)
            return ExchangeEngine(program, stamp, n_elements, slice_elements, layout)
        assert isinstance(layout, Layout)
        return Engine(program, stamp, n_elements, slice_elements, layout)


def _layout(
    program: Program | ExchangeProgram, n_elements: int, slice_elements: int
) -> Layout | ExchangeLayout:
    made = ExchangeLayout if isinstance(program, ExchangeProgram) else Layout
    return made(program, n_elements, slice_elements)  # type: ignore[arg-type]


def engine_for(program: AnyProgram, stamp: Stamp, n_elements: int, slice_elements: int) -> AnyEngine:
    """Make the engine that runs a program once: of trees, of an exchange, or over shared memory."""
    if isinstance(program, DirectProgram):
        return DirectEngine(program, stamp, n_elements)
    if isinstance(program, ExchangeProgram):
        return ExchangeEngine(program, stamp, n_elements, slice_elements)
    return Engine(program, stamp, n_elements, slice_elements)
