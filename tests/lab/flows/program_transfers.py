"""What the servers of a plan send, and what each transfer needs, read from their compiled programs alone.

It takes nothing from `bml.lab.flows`: every server is asked what it was told to do, and relays are followed
hop by hop. A piece is sent as soon as all that its sender adds or passes on has come. Healthy BML sends
ranges and bundles of pieces, as its programs name them.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from graphlib import TopologicalSorter

from programs_by_piece import parts_of, relays_of

from bml.schedule import Phase
from bml.schedule.ir.exchange import ExchangeProgram


@dataclass
class Transfer:
    """Bytes over one hop; `share` of the vector; `needs` are places in the list of all transfers."""

    phase: Phase
    sender: int
    level: int
    receiver: int
    share: Fraction
    needs: set = field(default_factory=set)


def transfers_of(programs, bundled):
    """All transfers of these programs, {server: program}; `bundled`: one for a range or bundle of pieces."""
    if any(isinstance(program, ExchangeProgram) for program in programs.values()):
        return _exchanged(programs)
    return _Wired(programs, bundled).transfers


class _Wired:
    def __init__(self, programs, bundled):
        self.programs = programs
        self.transfers = []
        self.parts, self.relays = parts_of(programs), relays_of(programs)
        self.arrives = {}
        """(phase, origin, dest, piece) -> the transfer with which it arrives."""
        self.leaves = []
        """(first transfer, phase, origin, pieces) of all that goes from one end of an edge to the other."""
        for server, program in programs.items():
            self.add_program(server, program, bundled)
        for first, phase, origin, pieces in self.leaves:
            for piece in pieces:
                self.transfers[first].needs |= self.needed(phase, origin, piece)

    def add_program(self, server, program, bundled):
        in_bundles = set()
        for bundle in program.bundles if bundled else ():
            pieces = range(bundle.start, bundle.stop)
            for hop in bundle.hops:
                self.add(Phase.BROADCAST, server, hop, pieces)
                in_bundles |= {(piece, hop.peer) for piece in pieces}
        for part in program.ranges:
            every = range(part.start, part.stop)
            for pieces in [every] if bundled else [range(piece, piece + 1) for piece in every]:
                if part.reduce_to:
                    self.add(Phase.REDUCE, server, part.reduce_to, pieces)
                for hop in part.broadcast_to:
                    if (pieces[0], hop.peer) not in in_bundles:
                        self.add(Phase.BROADCAST, server, hop, pieces)

    def add(self, phase, origin, hop, pieces):
        """One way from a server to the other end of an edge, over those that only pass it on."""
        program = self.programs[origin]
        if program.cumulative:
            weights = [program.cumulative[at] for at in (pieces.start, pieces.stop, -1)]
            share = Fraction(weights[1] - weights[0], weights[2])
        else:
            share = Fraction(len(pieces), program.pieces)
        sender, level, via, before = origin, hop.level, hop.via, set()
        self.leaves.append((len(self.transfers), phase, origin, pieces))
        while True:
            self.transfers.append(Transfer(phase, sender, level, via, share, before))
            before = {len(self.transfers) - 1}
            if via == hop.peer:
                break
            relays = {self.relays[via, phase, origin, hop.peer, piece] for piece in pieces}
            (relay,) = relays
            sender, level, via = via, relay.level, relay.via
        for piece in pieces:
            key = phase, origin, hop.peer, piece
            assert key not in self.arrives, f"sent twice: {key}"
            self.arrives[key] = len(self.transfers) - 1

    def needed(self, phase, server, piece):
        """What must have come to a server before it sends this piece on."""
        part = self.parts[server, piece]
        if phase is Phase.BROADCAST and part.broadcast_from:
            return {self.arrives[Phase.BROADCAST, part.broadcast_from.peer, server, piece]}
        return {self.arrives[Phase.REDUCE, hop.peer, server, piece] for hop in part.reduce_from}


def _exchanged(programs):
    """A round is sent when all that the rounds before bring is there; a pair's rounds follow one another."""
    transfers, between, sent = [], defaultdict(list), []
    for server, program in programs.items():
        for at, partners in enumerate(program.rounds):
            for hop in partners:
                assert hop.via == hop.peer
                between[server, hop.peer].append(len(transfers))
                sent.append((server, at))
                transfers.append(Transfer(Phase.REDUCE, server, hop.level, hop.peer, Fraction(1)))
    for transfer, (server, at) in zip(transfers, sent, strict=True):
        for number, partners in enumerate(programs[server].rounds[:at]):
            for hop in partners:
                turn = sum(
                    hop.peer == other.peer for own in programs[server].rounds[:number] for other in own
                )
                transfer.needs.add(between[hop.peer, server][turn])
    return transfers


class Names:
    """Numbers of transfers by all that there is to say of them and of those that they need, however far back.

    So two lists of transfers are the same if and only if their numbers are.
    """

    def __init__(self):
        self._known = {}

    def of(self, facts, needs):
        """The number of each transfer, given its facts and the places of those that it needs."""
        found = {}
        for at in TopologicalSorter(dict(enumerate(needs))).static_order():
            key = facts[at], tuple(sorted(found[need] for need in needs[at]))
            found[at] = self._known.setdefault(key, len(self._known))
        return sorted(found.values())
