"""The engine of one step on one server, for programs that are forests: it says when to add and send slices.

There is no barrier between stages: a slice goes on as soon as its inputs are there, so the reduction of later
slices overlaps the broadcast of earlier ones. The engine moves no bytes. `place` says where the payload of a
frame belongs, and `received` returns the instructions that follow when it is there. A `Workspace` and a
transport, real or simulated, carry them out.

State of a unit (a slice of a range):

    waiting   partial sums of children are missing           -- last one arrives -->  summed
    summed    the sum of my subtree is in OUT                 -- I am the root    -->  final
                                                              -- sent on, the result arrives --> final
    final     the result is in OUT and was passed on to `broadcast_to`

The step is complete when all units are final.

IN is only read. Results and partial sums share OUT, as the result of a unit can only arrive after its partial
sum has left. Partial sums of children have places of their own in SCRATCH, except those of one child for
every element: they wait in OUT, where the sum then takes their place. Frames that are passed on to others lie
in OUT, too, where nothing else can be: results at their own elements, whose bits they have; partial sums
where this server is a leaf and has sent its part from IN.
"""

from __future__ import annotations

from bisect import bisect_right

from bml.protocol.step.dataflow import Dataflow, Instruction, Place, Send, Stamp
from bml.protocol.step.layout import Layout, Out, Unit
from bml.protocol.wire.frame import Header, Kind
from bml.schedule import Program

_REDUCE = Kind.REDUCE


class Engine(Dataflow):
    """The dataflow of one step; see the module's text.

    `stamp` marks all its frames; the other arguments are those of `Layout`, or a `layout` that was made of
    them before.
    """

    def __init__(
        self,
        program: Program,
        stamp: Stamp,
        n_elements: int,
        slice_elements: int,
        layout: Layout | None = None,
    ):
        super().__init__(program.server, stamp, n_elements)
        self._layout = layout or Layout(program, n_elements, slice_elements)
        self.expected = self._layout.expected
        self.scratch_elements = self._layout.scratch_elements
        self.place = self._layout.place
        self._units = self._layout.units
        self._starts = self._layout.starts
        self._missing = self._layout.missing.copy()
        self._not_final = [bundle.stop - bundle.start for bundle in self._layout.bundles]

    def start(self) -> list[Instruction]:
        """Return the instructions that need this server's own contribution alone."""
        done: list[Instruction] = []
        for unit in self._layout.ready:
            self._summed(unit, done)
        return done

    def received(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> list[Instruction]:
        """The payload of a frame is in its place: return the instructions that it makes possible."""
        done: list[Instruction] = []
        if dest != self.server:
            self._pass_on(kind, origin, dest, start, stop, done)
            return done
        self.handled += stop - start
        if kind == _REDUCE:
            self._add(start, stop, done)
        else:
            self._spread_result(start, stop, done)
        return done

    def summand_place(self, header: Header) -> Place | None:
        """See Dataflow; None for frames that are passed on, or that their sender cut in another way."""
        kind, _, _, origin, dest, _, start, stop, _ = header
        if kind != _REDUCE or dest != self.server:
            return None
        unit = self._units[bisect_right(self._starts, start) - 1]
        if (unit.start, unit.stop) != (start, stop):
            return None
        return self.place(kind, origin, dest, start, stop)

    # --- the steps of a unit -------------------------------------------------------------------

    def _add(self, start: int, stop: int, done: list[Instruction]) -> None:
        index, units, missing = bisect_right(self._starts, start) - 1, self._units, self._missing
        while index < len(units):
            unit = units[index]
            if unit.start >= stop:
                return
            missing[index] -= min(stop, unit.stop) - max(start, unit.start)
            if not missing[index]:
                self._summed(unit, done)
            index += 1

    def _summed(self, unit: Unit, done: list[Instruction]) -> None:
        if unit.reduce is not None:
            done.append(unit.reduce)
        if unit.is_root:
            self._final(unit.start, unit.stop)
        done += [self._send(out, unit.start, unit.stop) for out in unit.summed]
        for number in unit.bundles:
            self._add_to_bundle(number, unit.stop - unit.start, done)

    def _spread_result(self, start: int, stop: int, done: list[Instruction]) -> None:
        self._final(start, stop)
        for a, b, outs, bundles in self._layout.broadcast(start, stop):
            done += [self._send(out, a, b) for out in outs]
            for number in bundles:
                self._add_to_bundle(number, b - a, done)

    def _add_to_bundle(self, number: int, n_elements: int, done: list[Instruction]) -> None:
        self._not_final[number] -= n_elements
        if not self._not_final[number]:
            start, stop, out = self._layout.bundles[number]
            done.append(self._send(out, start, stop))

    def _send(self, out: Out, start: int, stop: int) -> Send:
        kind, hop, place, priority = out
        return Send(
            hop.via, hop.level, self._header(kind, self.server, hop.peer, start, stop), place, priority
        )

    def _pass_on(
        self, kind: Kind, origin: int, dest: int, start: int, stop: int, done: list[Instruction]
    ) -> None:
        # One frame may become several here: the ways of its pieces differ further on.
        for run, relay in self._layout.relays[kind, origin, dest]:
            a, b = max(start, run.start), min(stop, run.stop)
            if a < b:
                header = self._header(kind, origin, dest, a, b)
                priority = self._layout.priority(kind, a)
                done.append(Send(relay.via, relay.level, header, run.at(a), priority))

    def _header(self, kind: Kind, origin: int, dest: int, start: int, stop: int) -> Header:
        epoch, step, signature, itemsize = self.stamp
        return Header(kind, epoch, step, origin, dest, signature, start, stop, (stop - start) * itemsize)
