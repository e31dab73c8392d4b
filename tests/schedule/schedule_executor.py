"""Runs all programs of a plan on integer vectors, hop by hop, and is strict about who expects what.

It knows nothing of forests: only what every server was told to do. So it is the oracle for the compiler,
the relays and the schedules together.
"""

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from programs_by_piece import parts_of, relays_of

from bml.schedule import Phase


@dataclass(frozen=True)
class Frame:
    """One piece of one tree edge on its way: now handed from `sender` to `via` over `level`."""

    phase: Phase
    origin: int
    dest: int
    piece: int
    sender: int
    via: int
    level: int
    data: np.ndarray


class Run:
    """One synchronisation of all live servers."""

    def __init__(self, fabric, programs, inputs):
        self.fabric = fabric
        self.programs = programs
        self.n = len(next(iter(inputs.values())))
        self.inputs = inputs
        self.results = {server: np.zeros(self.n, np.int64) for server in inputs}
        self.done = Counter()
        self.parts, self.relays = parts_of(programs), relays_of(programs)
        assert len(self.relays) == sum(
            relay.stop - relay.start for program in programs.values() for relay in program.relays
        ), "two relay entries of one server cover the same frame"
        self.waiting = {}
        self.frames = deque()

    def cut(self, server, piece):
        program = self.programs[server]
        return slice(program.cut(piece, self.n), program.cut(piece + 1, self.n))

    def run(self):
        for (server, piece), part in self.parts.items():
            self.waiting[server, piece] = {hop.peer: None for hop in part.reduce_from}
            if not part.reduce_from:
                self.gathered(server, piece)
        while self.frames:
            self.deliver(self.frames.popleft())
        assert not self.relays, f"relays that nothing came to: {self.relays}"
        for server, program in self.programs.items():
            assert self.done[server] == program.pieces, f"server {server} has {self.done[server]} pieces"
        return self.results

    def send(self, phase, origin, hop, piece, data):
        self.frames.append(Frame(phase, origin, hop.peer, piece, origin, hop.via, hop.level, data))

    def gathered(self, server, piece):
        """All children are in: add in id order and pass on, or at the root turn round."""
        part = self.parts[server, piece]
        total = self.inputs[server][self.cut(server, piece)].copy()
        for partial in self.waiting[server, piece].values():
            total += partial
        if part.reduce_to is None:
            assert part.broadcast_from is None
            self.finished(server, piece, total)
        else:
            self.send(Phase.REDUCE, server, part.reduce_to, piece, total)

    def finished(self, server, piece, total):
        self.results[server][self.cut(server, piece)] = total
        self.done[server] += 1
        for hop in self.parts[server, piece].broadcast_to:
            self.send(Phase.BROADCAST, server, hop, piece, total)

    def deliver(self, frame):
        fabric = self.fabric
        assert fabric.nic_alive(frame.sender, frame.level), f"dead NIC sends: {frame}"
        assert fabric.nic_alive(frame.via, frame.level), f"dead NIC receives: {frame}"
        assert frame.via in fabric.neighbours(frame.sender, frame.level), f"no such hop: {frame}"
        if frame.via != frame.dest:
            relay = self.relays.pop((frame.via, frame.phase, frame.origin, frame.dest, frame.piece))
            self.frames.append(
                Frame(
                    frame.phase,
                    frame.origin,
                    frame.dest,
                    frame.piece,
                    frame.via,
                    relay.via,
                    relay.level,
                    frame.data,
                )
            )
        elif frame.phase is Phase.REDUCE:
            self.receive_partial(frame)
        else:
            hop = self.parts[frame.dest, frame.piece].broadcast_from
            self.check_expected(hop, frame)
            self.finished(frame.dest, frame.piece, frame.data)

    def receive_partial(self, frame):
        part = self.parts[frame.dest, frame.piece]
        hop = next((hop for hop in part.reduce_from if hop.peer == frame.origin), None)
        self.check_expected(hop, frame)
        waiting = self.waiting[frame.dest, frame.piece]
        assert waiting[frame.origin] is None, f"arrived twice: {frame}"
        waiting[frame.origin] = frame.data
        if all(partial is not None for partial in waiting.values()):
            self.gathered(frame.dest, frame.piece)

    def check_expected(self, hop, frame):
        assert hop is not None, f"nobody expects {frame}"
        assert (hop.peer, hop.via, hop.level) == (frame.origin, frame.sender, frame.level), (
            f"{hop} was expected, {frame} came"
        )


def check_sums(fabric, programs, n_elements, seed=0):
    """Run the programs of all live servers and check that each ends with the sum of all inputs."""
    rng = np.random.default_rng(seed)
    inputs = {server: rng.integers(-(2**40), 2**40, n_elements) for server in fabric.servers}
    total = sum(inputs.values())
    for server, result in Run(fabric, programs, inputs).run().items():
        assert (result == total).all(), f"server {server} has a wrong sum"
        gather_order = [[hop.peer for hop in part.reduce_from] for part in programs[server].ranges]
        assert all(order == sorted(order) for order in gather_order)


def slots(forest, fabric, phase):
    """Weight of the slowest NIC in each stage of a phase, in and out separately."""
    counts = Counter()
    for hops in forest.blocks(phase):
        columns = (hops.piece, hops.stage, hops.sender, hops.receiver, hops.level)
        for piece, stage, sender, receiver, level in zip(*columns, strict=True):
            counts[int(stage), "out", int(sender), int(level)] += int(forest.weight[piece])
            counts[int(stage), "in", int(receiver), int(level)] += int(forest.weight[piece])
    stages = sorted({key[0] for key in counts})
    return [max(count for key, count in counts.items() if key[0] == stage) for stage in stages]
