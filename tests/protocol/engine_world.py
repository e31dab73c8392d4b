"""Joins the engines of all servers through a bag of frames that is emptied in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from every_algorithm import ON_ENGINES
from numpy.typing import NDArray

from bml.protocol.step.dataflow import Place, Reduce, Send, Stamp
from bml.protocol.step.engine import Engine
from bml.protocol.step.workspace import Workspace
from bml.schedule import Program, plan
from bml.topology import Fabric, FabricError, UsageError, parse

Vectors = dict[int, NDArray[np.generic]]

FABRICS = ("bcube:2x2", "bcube:3x1", "bcube:3x2", "bcube:2x3", "torus:3x2", "switch:5")
DAMAGE: tuple[tuple[str, ...], ...] = (
    (),
    ("server:0",),
    ("server:2",),
    ("link:1/0",),
    ("switch:0/0",),
    ("server:1", "link:2/0"),
)


def programs(fabric: Fabric, algorithm: str) -> dict[int, Program] | None:
    """All servers' programs, or None where the algorithm does not exist or the engine has no part in it."""
    try:
        made = plan(fabric, algorithm)
        found = {server: made.program(server) for server in fabric.servers}
    except (UsageError, FabricError):
        return None
    return {server: one for server, one in found.items() if isinstance(one, Program)} or None


def kind_of(fabric: Fabric, algorithm: str) -> tuple[str, str]:
    """What `make test` has one case of: each algorithm on each fabric, with another damage by turns."""
    return str(fabric).partition(" ")[0], algorithm


def cases() -> list[tuple[Fabric, str]]:
    """(fabric with its damage, algorithm) of everything that can be planned."""
    found = []
    for name in FABRICS:
        for damage in DAMAGE:
            try:
                fabric = parse(name).without(*damage)
            except UsageError:
                continue  # this fabric has no such part
            if fabric.is_connected and len(fabric.servers) > 1:
                found += [(fabric, algorithm) for algorithm in ON_ENGINES if programs(fabric, algorithm)]
    return found


@dataclass
class _Node:
    engine: Engine
    workspace: Workspace


class World:
    """One all-reduce. `chance` decides the order of delivery and how every server cuts its slices."""

    def __init__(self, made: dict[int, Program], inputs: Vectors, chance: random.Random, op: str = "sum"):
        self.chance = chance
        self.bag: list[tuple[int, Send, bytes]] = []
        self.nodes: dict[int, _Node] = {}
        self.delivered = 0
        for server, program in made.items():
            vector = inputs[server]
            stamp = Stamp(3, 7, 99, vector.itemsize)
            engine = Engine(program, stamp, vector.size, chance.choice([1, 2, 3, 5, 7, 64, 10**6]))
            self.nodes[server] = _Node(engine, Workspace(vector, engine.scratch_elements, op))
        for server, node in self.nodes.items():
            self.carry_out(server, list(node.engine.start()))

    def carry_out(self, server: int, instructions: list[Send | Reduce]) -> None:
        workspace = self.nodes[server].workspace
        for instruction in instructions:
            if isinstance(instruction, Reduce):
                workspace.reduce(instruction)
                continue
            assert instruction.place is not None
            size = instruction.header.stop - instruction.header.start
            payload = bytes(workspace.view(instruction.place, size))
            assert len(payload) == instruction.header.nbytes
            self.bag.append((server, instruction, payload))

    def deliver_one(self) -> None:
        index = self.chance.randrange(len(self.bag))
        self.bag[index], self.bag[-1] = self.bag[-1], self.bag[index]
        sender, send, payload = self.bag.pop()
        size = send.header.stop - send.header.start
        now = bytes(self.nodes[sender].workspace.view(send.place, size))
        assert now == payload, "it was overwritten before it left"
        kind, _, _, origin, dest, _, start, stop, _ = send.header
        node = self.nodes[send.peer]
        place: Place = node.engine.place(kind, origin, dest, start, stop)
        node.workspace.view(place, stop - start)[:] = payload
        self.delivered += 1
        self.carry_out(send.peer, list(node.engine.received(kind, origin, dest, start, stop)))

    def run(self) -> Vectors:
        while self.bag:
            self.deliver_one()
        return {server: node.workspace.result for server, node in self.nodes.items()}
