"""BML on a BCube: thread p corrects the digits in the order p, p+1, ..., so that all levels work at once.

docs/explanation/schedules.md compares it with others.

Source: Wang, Li, Cheng, Geng, Wang, Wang, Xia, Wu: "BML: A High-performance, Low-cost Gradient
Synchronization Algorithm for DML Training", NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bml.faults.repartition import owners
from bml.schedule.ir.forest import AT_ROOT, NOT_THERE, Forest
from bml.topology import Fabric


@dataclass(frozen=True, eq=False)
class ThreadTrees:
    """The trees on which one thread would reduce its pieces if nothing were broken.

    Attributes:
        thread: p.
        roots: int32 [piece of the thread], owners in piece order (live servers only).
        parent: int32 [piece, server], parent of every server, dead ones too; AT_ROOT at the root.
        stage: int16 [piece, server], 0 .. k-1; the hop corrects digit (p + stage) mod k. -1 at the root.
    """

    thread: int
    roots: NDArray[np.int32]
    parent: NDArray[np.int32]
    stage: NDArray[np.int16]


def digits_of(fabric: Fabric) -> NDArray[np.int32]:
    """Return the addresses of all servers of a BCube, int32 [server, level]."""
    servers = np.arange(fabric.n_servers, dtype=np.int32)[:, None]
    return servers // np.int32(fabric.ports) ** np.arange(fabric.levels, dtype=np.int32) % fabric.ports


def thread_trees(fabric: Fabric, thread: int, owned_by: Sequence[int] | None = None) -> ThreadTrees:
    """Compute one thread's trees: the first digit, in the thread's order, that differs is corrected.

    `owned_by`: the owners, in piece order; all live servers if it is not given.
    """
    digits = digits_of(fabric)
    roots = np.array(owners(fabric, thread) if owned_by is None else owned_by, np.int32)
    servers = np.arange(fabric.n_servers, dtype=np.int32)
    parent = np.full((len(roots), fabric.n_servers), AT_ROOT, np.int32)
    stage = np.full(parent.shape, -1, np.int16)
    # Last stage first: an earlier stage that also differs overwrites it.
    for number in reversed(range(fabric.levels)):
        level = (thread + number) % fabric.levels
        wanted = digits[roots, level][:, None]
        differs = wanted != digits[None, :, level]
        target = servers + (wanted - digits[None, :, level]) * np.int32(fabric.ports**level)
        np.copyto(parent, target, where=differs)
        stage[differs] = number
    return ThreadTrees(thread, roots, parent, stage)


def assemble(fabric: Fabric, threads: list[ThreadTrees]) -> Forest:
    """Join the threads into a forest of equal pieces whose hops all take the level of their stage.

    Dead servers are marked as not there; a parent that is dead, or a hop over a dead NIC, is left as it
    is for the caller to mend.
    """
    parent = np.concatenate([one.parent for one in threads])
    stage = np.concatenate([one.stage for one in threads])
    level = np.concatenate([(one.thread + one.stage) % fabric.levels for one in threads]).astype(np.int8)
    level[stage < 0] = -1
    dead = np.setdiff1d(np.arange(fabric.n_servers), np.array(fabric.servers))
    parent[:, dead] = NOT_THERE
    stage[:, dead] = -1
    level[:, dead] = -1
    root = np.concatenate([one.roots for one in threads])
    return Forest(root, np.ones(len(root), np.int64), parent, level, stage)


def bml(fabric: Fabric) -> Forest:
    """Build BML for a healthy fabric: k·N equal pieces, GST = 2(N-1)/(kN)·T."""
    return assemble(fabric, [thread_trees(fabric, thread) for thread in range(fabric.levels)])
