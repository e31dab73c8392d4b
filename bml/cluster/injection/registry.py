"""The registry of acts: what a server, or the coordinator, does to apply a fault of some kind.

    @on_server("kill", does="sends SIGKILL to its process")
    def kill(fault: Fault, actuators: Actuators) -> None: ...

A kind of which bml.faults.kinds says that it is applied on a server, or by the coordinator, has one act
there; a test holds that. Acts on emulated cables and machines are in bml.fabric.injector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from bml.cluster.injection.actuators import Actuators
from bml.faults import Fault
from bml.faults.kinds import KINDS, Harness

ServerAct: TypeAlias = Callable[[Fault, Actuators], None]
CoordinatorAct: TypeAlias = Callable[[Fault, Callable[[Fault], None]], None]
"""Its second argument asks the launcher for a fault."""
AnyAct = TypeVar("AnyAct", ServerAct, CoordinatorAct)


class Act(NamedTuple, Generic[AnyAct]):
    """A function that applies a fault, and words for it that go on after "server 4"."""

    apply: AnyAct
    does: str


SERVER_ACTS: dict[str, Act[ServerAct]] = {}
"""Kind -> the act of the server that the fault strikes."""
COORDINATOR_ACTS: dict[str, Act[CoordinatorAct]] = {}
"""Kind -> the act of the coordinator when the lowest live server asks for it."""


def on_server(*kinds: str, does: str) -> Callable[[ServerAct], ServerAct]:
    """Register what the struck server does for faults of these kinds; `does` goes on after "server 4"."""

    def register(act: ServerAct) -> ServerAct:
        for kind in kinds:
            _check(kind, "server", kind in SERVER_ACTS)
            SERVER_ACTS[kind] = Act(act, does)
        return act

    return register


def on_coordinator(kind: str, does: str) -> Callable[[CoordinatorAct], CoordinatorAct]:
    """Register what the coordinator does; `does` goes on after "server 4", the server that asks for it."""

    def register(act: CoordinatorAct) -> CoordinatorAct:
        _check(kind, "coordinator", kind in COORDINATOR_ACTS)
        COORDINATOR_ACTS[kind] = Act(act, does)
        return act

    return register


def _check(kind: str, harness: Harness, there: bool) -> None:
    if kind not in KINDS or harness not in KINDS[kind].on:
        raise ValueError(f"bml.faults.kinds does not say that '{kind}' is applied on: {harness}")
    if there:
        raise ValueError(f"there are two acts for '{kind}' on: {harness}")
