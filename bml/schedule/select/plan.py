"""A plan: an algorithm on a fabric, with its schedule, its cost and every server's program."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TypeAlias

from bml.schedule.algorithms.direct import DirectProgram
from bml.schedule.algorithms.exchange import one_server
from bml.schedule.algorithms.registry import find
from bml.schedule.ir import cost
from bml.schedule.ir.cost import Load
from bml.schedule.ir.exchange import Exchange, ExchangeProgram, verify_exchange
from bml.schedule.ir.forest import Forest
from bml.schedule.ir.program import Program, compile_program, local_bml
from bml.schedule.ir.verify import verify
from bml.schedule.select.cases import case_of, has_case
from bml.schedule.select.model import Counts, Price, counts, counts_of_bml
from bml.schedule.select.sample import load_of_bml, sample_of_bml
from bml.schedule.select.sample_torus import is_even_torus, load_of_torus, sample_of_torus, staged_of_torus
from bml.topology import BCube, Fabric, UsageError

_MOST_BUILT = 1 << 22
"""Entries, pieces times servers, of a healthy forest that is built only to be costed or verified."""
_SAMPLE = 64
"""Pieces that are verified of a larger one."""

AnyProgram: TypeAlias = Program | ExchangeProgram | DirectProgram
"""The program of one server: in either form of schedule, or without one where memory is shared."""


@dataclass(frozen=True)
class Plan:
    """A schedule for one fabric. It is built when first asked for and then kept.

    Attributes:
        fabric: what it is for, failures included.
        algorithm: the one that is used, never `auto`.
        why: reason for this algorithm, in words.
        prices: what the candidates cost, this one first, if the size decided between them.
    """

    fabric: Fabric
    algorithm: str
    why: str
    prices: tuple[Price, ...] = ()

    @cached_property
    def schedule(self) -> Forest | Exchange:
        """All trees, or for `exchange` all rounds.

        Raises:
            FabricError: this algorithm cannot work on this fabric; the message says why.
        """
        if has_case(self.algorithm, self.fabric):
            case, symmetry = case_of(self.algorithm, self.fabric)
            return symmetry.apply(case.forest) if symmetry else case.forest
        algorithm, argument = find(self.algorithm)
        return algorithm.build(self.fabric, argument)

    def build(self) -> None:
        """Do all work that the programs of different servers share.

        Raises:
            FabricError: as `schedule`.
        """
        if has_case(self.algorithm, self.fabric):
            case_of(self.algorithm, self.fabric)
        elif not (self.is_plain_bml or self._is_plain_exchange):
            self.schedule  # noqa: B018 (builds it)

    @property
    def forest(self) -> Forest:
        """All trees. Raises UsageError for `exchange`, which is no forest."""
        if isinstance(self.schedule, Exchange):
            raise UsageError(f"{self.algorithm} is no forest: use `schedule`")
        return self.schedule

    @property
    def pieces(self) -> int:
        """Number of pieces of the vector; 1 for `exchange`, which sends it whole."""
        if self.is_plain_bml or self._is_large_torus:
            return self.fabric.levels * self.fabric.n_servers
        return 1 if isinstance(self.schedule, Exchange) else self.schedule.pieces

    @property
    def detours(self) -> int:
        """Number of tree edges of the reduce phase that are relayed."""
        if self.is_plain_bml or self._is_large_torus:
            return 0
        return 0 if isinstance(self.schedule, Exchange) else len(self.schedule.detours)

    def load(self) -> Load:
        """Traffic of every NIC in one synchronisation; as the times, of plain BML in closed form."""
        if self.is_plain_bml:
            return load_of_bml(self.fabric)
        if self._is_large_torus:
            return load_of_torus(self.fabric)
        schedule = self.schedule
        return schedule.load if isinstance(schedule, Exchange) else cost.load(schedule, self.fabric)

    def gst(self) -> Fraction:
        """Pipelined synchronisation time in T."""
        if self._is_uniform_bml or self._is_large_torus:
            return self.load().busiest
        schedule = self.schedule
        return schedule.gst() if isinstance(schedule, Exchange) else cost.gst(schedule, self.fabric)

    def gst_staged(self) -> Fraction:
        """Synchronisation time in T with a barrier after every stage."""
        if self._is_uniform_bml:
            return self.load().busiest  # all NICs are busy in all stages
        if self._is_large_torus:
            return staged_of_torus(self.fabric)
        schedule = self.schedule
        return (
            schedule.gst_staged()
            if isinstance(schedule, Exchange)
            else cost.gst_staged(schedule, self.fabric)
        )

    def counts(self) -> Counts:
        """Rounds, bytes and additions for the cost model; on a healthy BCube without building anything.

        Raises:
            UsageError: the schedule is a torus too large to be built.
        """
        if self._is_uniform_bml:
            return counts_of_bml(self.fabric)
        if self._is_large_torus:
            raise UsageError(
                f"the cost model counts whole schedules, and that of {self.fabric} is too large to be built: "
                "leave out the size of the vector"
            )
        if self._is_plain_exchange and not self.fabric.rates:
            return counts(one_server(self.fabric, 0), self.fabric)
        if has_case(self.algorithm, self.fabric):
            return case_of(self.algorithm, self.fabric)[0].counts
        return counts(self.schedule, self.fabric)

    def frames(self) -> int:
        """Frames of a short vector that the busiest server sends and receives, relayed ones twice.

        Raises:
            FabricError: as `schedule`.
        """
        return max(self.program(server).frames for server in self.fabric.servers)

    @property
    def verified_pieces(self) -> int:
        """Number of pieces that `violations` looks at: all, or a sample if they are too many to be built."""
        too_large = self.is_plain_bml and self.pieces * self.fabric.n_servers > _MOST_BUILT
        return min(_SAMPLE, self.pieces) if too_large or self._is_large_torus else self.pieces

    def violations(self) -> list[str]:
        """Return what is wrong with the schedule, in words; empty when sound. See `verified_pieces`."""
        if self._is_large_torus:
            return verify(sample_of_torus(self.fabric, self.verified_pieces), self.fabric)
        if self.verified_pieces < self.pieces:
            return verify(sample_of_bml(self.fabric, self.verified_pieces), self.fabric)
        schedule = self.schedule
        if isinstance(schedule, Exchange):
            return verify_exchange(schedule, self.fabric)
        return verify(schedule, self.fabric)

    def program(self, server: int) -> Program | ExchangeProgram:
        """Compile what one server does, without building the forest where that is not needed.

        Raises:
            UsageError: the server is dead or does not exist.
        """
        if not self.fabric.server_alive(server):
            raise UsageError(f"server {server} is not alive in {self.fabric}: it has no program")
        if self.is_plain_bml:
            return local_bml(self.fabric, server)
        if self._is_plain_exchange:
            return one_server(self.fabric, server).program(server)
        if has_case(self.algorithm, self.fabric):
            case, symmetry = case_of(self.algorithm, self.fabric)
            return compile_program(case.forest, server, symmetry)
        if isinstance(self.schedule, Exchange):
            return self.schedule.program(server)
        return compile_program(self.schedule, server)

    @property
    def _name(self) -> str:
        """The name under which the algorithm is known, without what follows the colon."""
        return find(self.algorithm)[0].name

    @property
    def is_plain_bml(self) -> bool:
        """Whether this is BML on a healthy BCube, which needs no forest."""
        is_bml = self._name == "bml" and isinstance(self.fabric.wiring, BCube)
        return is_bml and not self.fabric.failures

    @property
    def _is_large_torus(self) -> bool:
        """Whether this is BML on a healthy torus whose trees are too many to be built, and all alike."""
        rings = self._name == "bml" or self.algorithm in ("hips", "hips:ring")
        return (
            rings
            and is_even_torus(self.fabric)
            and self.fabric.levels * self.fabric.n_servers**2 > _MOST_BUILT
        )

    @property
    def _is_uniform_bml(self) -> bool:
        """Whether this is BML on a healthy BCube whose links are alike, which has closed formulas."""
        return self.is_plain_bml and not self.fabric.rates

    @property
    def _is_plain_exchange(self) -> bool:
        """Whether this is an exchange on a healthy fabric, where one server tells of all."""
        return self.algorithm == "exchange" and not self.fabric.failures
