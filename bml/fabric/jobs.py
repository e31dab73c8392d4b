"""The emulated fabric of a job: one that a user keeps up, or one that is made for the job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain, count

from bml.fabric import inventory, state
from bml.fabric.condition import Condition
from bml.fabric.layout import Layout, parse_rate
from bml.fabric.network import DEFAULT_RATE, EmulatedFabric, build, find, remove_orphans
from bml.topology import parse


def use(name: str) -> EmulatedFabric:
    """The fabric that is up under this name. Raises FabricError if there is none, or another job's."""
    network = find(name)
    inventory.refuse_a_jobs(name, inventory.complete(name))
    return network


def use_or_make(shape: str, name: str) -> tuple[EmulatedFabric, bool]:
    """Return (fabric, made): the fabric that a user keeps up under this name, or one made for this process.

    If another job uses the name, the new fabric is called NAME2, NAME3, … The caller must take down a fabric
    that was made for it. Fabrics of jobs that were killed are removed first; one that a user keeps up as
    NAME2 stays.

    Raises FabricError and UsageError as `up`.
    """
    layout = Layout(parse(shape), name)
    with state.locked():
        remove_orphans()
        kept = inventory.known(name)
        if kept is not None and kept.complete and not kept.alone:
            return EmulatedFabric(Layout(parse(kept.fabric), name)), False
        rate_bit = parse_rate(DEFAULT_RATE)
        free = next(each for each in _names(name) if _is_free(each))
        return build(Layout(layout.fabric, free), Condition(rate_bit, rate_bit), os.getpid(), True), True


def _names(name: str) -> Iterator[str]:
    return chain([name], (f"{name}{number}" for number in count(2)))


def _is_free(name: str) -> bool:
    """Whether no job, no user's fabric and no namespace of another program has this name."""
    found = inventory.known(name)
    return (found is None or not (found.complete or found.maker)) and not inventory.others(name)
