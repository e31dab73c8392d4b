"""Payloads that are not copied when they are sent but read where they lie, as late as can be.

The claim of bml.sharedmem.zero_copy about the engines: a payload stays as it was sent until the server that
got it has used it. So here a frame is a reference to its sender's memory; some are held back until nothing
else is left to deliver, so that everything else has happened that can. Partial sums are not read even then,
but when the sum is made of which they are a term. The sums must still be exact.
"""

import random
from typing import Any

import numpy as np
import pytest
from engine_world import DAMAGE, FABRICS, World, cases, kind_of, programs
from sampled import one_of_each

from bml.protocol.step import engine
from bml.protocol.step.dataflow import Send, Stamp
from bml.protocol.step.exchange import engine_for
from bml.protocol.step.workspace import Workspace
from bml.schedule import ExchangeProgram, plan
from bml.topology import Fabric, parse
from bml.topology.errors import FabricError, UsageError

CASES = cases()
LENGTHS = (5, 41)


class ReferenceWorld(World):
    """A world whose bag holds references. `held` of the frames wait until all others are delivered."""

    def __init__(self, *arguments: Any, held: float = 0.3):
        self._held = held
        self.referred = 0
        self._late: list[tuple[int, Send]] = []
        super().__init__(*arguments)

    def carry_out(self, server: int, instructions: list[Any]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                late = self.chance.random() < self._held
                (self._late if late else self.bag).append((server, instruction))  # type: ignore[arg-type]
            else:
                self.nodes[server].workspace.reduce(instruction)

    def run(self) -> dict[int, Any]:
        while self.bag or self._late:
            bag: list[Any] = self.bag or self._late
            sender, send = bag.pop(self.chance.randrange(len(bag)))
            size = send.header.stop - send.header.start
            referenced = self.nodes[sender].workspace.view(send.place, size)
            kind, _, _, origin, dest, _, start, stop, _ = send.header
            node = self.nodes[send.peer]
            term = node.engine.summand_place(send.header)
            if term is not None:
                node.workspace.refer(term, referenced)
                self.referred += 1
            else:
                node.workspace.view(node.engine.place(kind, origin, dest, start, stop), size)[:] = referenced
            self.carry_out(send.peer, node.engine.received(kind, origin, dest, start, stop))
        assert all(node.engine.complete for node in self.nodes.values())
        return {server: node.workspace.result for server, node in self.nodes.items()}


class ReferenceExchange(ReferenceWorld):
    """The same for programs of exchanges."""

    def __init__(self, made: dict[int, ExchangeProgram], inputs: Any, chance: random.Random):
        super().__init__({}, inputs, chance)
        for server, program in made.items():
            vector = inputs[server]
            one = engine_for(
                program, Stamp(3, 7, 99, vector.itemsize), vector.size, chance.choice([1, 3, 64])
            )
            workspace = Workspace(vector, one.scratch_elements, "sum")
            self.nodes[server] = _Node(one, workspace)  # type: ignore[assignment]
        for server, node in self.nodes.items():
            self.carry_out(server, node.engine.start())  # type: ignore[arg-type]


class _Node:
    def __init__(self, one: Any, workspace: Workspace):
        self.engine, self.workspace = one, workspace


def exchanges() -> list[tuple[Fabric, dict[int, ExchangeProgram]]]:
    found = []
    for name in FABRICS:
        for damage in DAMAGE:
            try:
                fabric = parse(name).without(*damage)
                made = plan(fabric, "exchange")
                ours = {server: made.program(server) for server in fabric.servers}
            except (UsageError, FabricError):
                continue
            if len(ours) > 1 and all(isinstance(each, ExchangeProgram) for each in ours.values()):
                found.append((fabric, ours))
    return found


def vectors(fabric: Fabric, n: int) -> dict[int, Any]:
    chance = np.random.default_rng(n)
    return {server: chance.integers(-(2**40), 2**40, n) for server in fabric.servers}


@pytest.mark.parametrize(
    ("fabric", "algorithm"), one_of_each(kind_of, CASES), ids=[f"{f} by {a}" for f, a in CASES]
)
def test_a_payload_stays_until_it_was_taken(fabric: Fabric, algorithm: str) -> None:
    made = programs(fabric, algorithm)
    for n in LENGTHS:
        inputs = vectors(fabric, n)
        world = ReferenceWorld(made, inputs, random.Random(n))
        for server, result in world.run().items():
            assert np.array_equal(result, sum(inputs.values())), f"server {server}, {n} elements"


def test_partial_sums_are_read_where_they_lie() -> None:
    fabric = parse("bcube:3x2")
    world = ReferenceWorld(programs(fabric, "auto"), vectors(fabric, 41), random.Random(1))
    world.run()
    assert world.referred


@pytest.mark.parametrize(("fabric", "made"), exchanges(), ids=[str(fabric) for fabric, _ in exchanges()])
def test_in_an_exchange_too(fabric: Fabric, made: dict[int, ExchangeProgram]) -> None:
    for n in LENGTHS:
        inputs = vectors(fabric, n)
        for seed in range(4):
            for result in ReferenceExchange(made, inputs, random.Random(seed)).run().values():
                assert np.array_equal(result, sum(inputs.values()))


def test_a_place_that_is_used_again_too_early_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that sends from where its result goes, and uses that place for something else after sending."""
    original = engine.Engine._summed

    def hasty(self: Any, unit: Any, done: list[Any]) -> None:
        original(self, unit, done)
        if unit.summed and not unit.is_root and unit.reduce is not None:
            done.append(replace_first(unit.reduce))

    def replace_first(reduce: Any) -> Any:
        return reduce._replace(terms=reduce.terms[:1])

    monkeypatch.setattr(engine.Engine, "_summed", hasty)
    fabric = parse("bcube:3x2")
    inputs = vectors(fabric, 41)
    results = ReferenceWorld(programs(fabric, "tree"), inputs, random.Random(1)).run().values()
    assert not all(np.array_equal(result, sum(inputs.values())) for result in results)
