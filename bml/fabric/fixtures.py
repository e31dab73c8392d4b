"""Emulated fabrics for tests: a pytest fixture that brings them up and takes them down whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from bml.fabric.network import DEFAULT_RATE, Emulated, down, obstacle, up

BringUp = Callable[..., Emulated]


@pytest.fixture(scope="session")
def emulated_fabric() -> Iterator[BringUp]:
    """Return `bring_up(shape, rate="200mbit")`: the same healed fabric for the same shape, for all tests.

    Skips the test, with the reason, where no fabric can be emulated.
    """
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    made: dict[str, Emulated] = {}

    def bring_up(shape: str, rate: str = DEFAULT_RATE) -> Emulated:
        if shape not in made:
            made[shape] = up(shape, rate, name=f"t{os.getpid()}n{len(made)}")
        made[shape].heal_all()
        made[shape].shape(rate, rate)
        return made[shape]

    try:
        yield bring_up
    finally:
        for network in made.values():
            down(network.name)
