"""The kinds of faults: what each breaks, how it is written, what it takes, and where its acts are.

A kind is one entry of `KINDS` and an act in each harness that the entry names: `server` and `coordinator` are
registered in bml.cluster.injection, `fabric` in bml.fabric.injector. Tests and the table of
docs/guides/testing.md are made from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from bml.topology import Fabric, Failure, LinkFailure

Harness: TypeAlias = Literal["server", "coordinator", "fabric"]
"""The place where a fault is applied.

server: on the server that it strikes, by that server. coordinator: in the coordinator's process, when the
lowest live server asks for it. fabric: to the cables and machines of an emulated fabric, by the launcher; on
such a fabric this act is taken in place of the server's.
"""
Part: TypeAlias = Literal["server", "link", "switch", ""]
"""The part that a fault breaks; nothing stands for the coordinator."""
BUSY_SHARE = 0.5
"""The share of its computation that a busy server loses if none is given."""
_MOST_BUSY = 0.99
Check: TypeAlias = Callable[[Failure | None, Mapping[str, Any], Fabric], str]


def _nothing_wrong(target: Failure | None, settings: Mapping[str, Any], fabric: Fabric) -> str:
    return ""


def _check_stall(target: Failure | None, settings: Mapping[str, Any], fabric: Fabric) -> str:
    peer = settings["peer"]
    if isinstance(target, LinkFailure) and peer in fabric.neighbours(target.server, target.level):
        return ""
    return f"server {peer} has no NIC on the other side of {target}"


def _check_busy(target: Failure | None, settings: Mapping[str, Any], fabric: Fabric) -> str:
    is_possible = settings.get("share", BUSY_SHARE) <= _MOST_BUSY
    return "" if is_possible else f"a server that still computes is at most {_MOST_BUSY:.0%} busy"


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of one kind of fault.

    Attributes:
        target: what it breaks: server, link, switch, or nothing for the coordinator.
        example: how it is written.
        means: what really happens to the part of the example, in Markdown, for the table of the documents.
        on: the harnesses that have an act for it.
        simulated: the mishap that stands for it in `bml check`; "" if none does.
        takes: settings that it can have, see bml.faults.settings.
        needs: those of them that it must have.
        drawable: whether plans can be drawn with it: a job survives it, on any fabric, without settings.
        coordinator: example and meaning with the target `coordinator`, if it can have that, too.
        both_ends: whether the servers at the other end of its cable act, too: they send what arrives.
        check: says what is wrong with its settings together, or with its target on a fabric, else "".
    """

    target: Part
    example: str
    means: str
    on: tuple[Harness, ...]
    simulated: str = ""
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    drawable: bool = False
    coordinator: tuple[str, str] | None = None
    both_ends: bool = False
    check: Check = _nothing_wrong

    @property
    def emulated(self) -> bool:
        """Whether it needs cables that can really be broken, or machines."""
        return self.on == ("fabric",)

    @property
    def by_anybody(self) -> bool:
        """Whether its part cannot do it to itself: the lowest live server asks for it."""
        return self.on == ("coordinator",)


_LASTING = ("for",)
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill": Kind(
            "server",
            "kill:4@step=20",
            "server 4's process gets SIGKILL",
            on=("server",),
            simulated="crash",
            drawable=True,
        ),
        "freeze": Kind(
            "server",
            "freeze:2@step=5,for=3s",
            "SIGSTOP, and SIGCONT three seconds later",
            on=("server", "coordinator"),
            simulated="freeze",
            takes=_LASTING,
            drawable=True,
            coordinator=(
                "freeze:coordinator@step=10,for=60s",
                "the coordinator's process gets SIGSTOP, and SIGCONT a minute later, if it is still there",
            ),
        ),
        "cut": Kind(
            "link",
            "cut:4/0@t=1.5s",
            "NIC 4/0 loses its cable, and its server notices",
            on=("server", "fabric"),
            simulated="silent",
            takes=_LASTING,
            drawable=True,
        ),
        "blackhole": Kind(
            "link",
            "blackhole:4/0@step=9",
            "everything on NIC 4/0 is dropped silently",
            on=("server", "fabric"),
            simulated="silent",
            takes=_LASTING,
            drawable=True,
        ),
        "stall": Kind(
            "link",
            "stall:4/0,peer=5@step=9,for=3s",
            "the data of one connection stop, its heartbeats pass: the kernels of both ends drop the data",
            on=("server",),
            simulated="stall",
            takes=("for", "peer"),
            needs=("peer",),
            check=_check_stall,
        ),
        "switch": Kind(
            "switch",
            "switch:0/2@step=9",
            "all NICs of that switch are dead",
            on=("server", "fabric"),
            simulated="switch",
            takes=_LASTING,
            drawable=True,
        ),
        "coordinator": Kind(
            "",
            "coordinator@step=12",
            "the coordinator's process gets SIGKILL",
            on=("coordinator",),
            simulated="coordinator-crash",
            drawable=True,
        ),
        "leave": Kind(
            "server",
            "leave:4@step=9",
            "no fault: server 4 is asked to go, as by SIGTERM; it leaves between two iterations of a loop",
            on=("server",),
            simulated="leave",
        ),
        "join": Kind(
            "server",
            "join:4@step=20",
            "no fault: server 4 is started again, or was absent (`--absent 4`), and joins; the lowest live "
            "server asks for it",
            on=("coordinator",),
            simulated="join",
        ),
        "exception": Kind(
            "server",
            "exception:4@step=9",
            "server 4's training function raises in its next or current call",
            on=("server",),
            simulated="raise",
        ),
        "exit": Kind(
            "server",
            "exit:4@step=9",
            "the process ends itself with status 70, without a word",
            on=("server",),
            simulated="crash",
            drawable=True,
        ),
        "gil": Kind(
            "server",
            "gil:4@step=9,for=2s",
            "a call of C holds the interpreter's lock: no thread of Python runs",
            on=("server",),
            simulated="gil",
            takes=_LASTING,
            needs=_LASTING,
        ),
        "busy": Kind(
            "server",
            "busy:4@step=9,share=50%",
            "server 4 loses that share of its time of computation, so that what took 1 s takes "
            "1 s / (1 - share): its training function sleeps before its next call, no other thread does",
            on=("server",),
            simulated="busy",
            takes=("for", "share"),
            drawable=True,
            check=_check_busy,
        ),
        "flap": Kind(
            "link",
            "flap:4/0@step=9,every=0.4s,for=4s",
            "the cable is dead for the first half of every period",
            on=("server", "fabric"),
            takes=("for", "every"),
            drawable=True,
        ),
        "node": Kind(
            "server",
            "node:4@step=20",
            "on the emulated fabric only: every process in server 4's namespace gets SIGKILL, its Ray node "
            "too",
            on=("fabric",),
            simulated="crash",
        ),
        "slow": Kind(
            "link",
            "slow:4/1@step=8,rate=10mbit",
            "the cable carries no more than that, each way; without real cables kernels at both ends pace "
            "their connections, each of which has an equal part of the rate",
            on=("server", "fabric"),
            simulated="slow",
            takes=("for", "rate", "direction"),
            needs=("rate",),
            both_ends=True,
        ),
        "loss": Kind(
            "link",
            "loss:4/1@step=8,share=5%",
            "on the emulated fabric only: that share of the packets is lost, each way",
            on=("fabric",),
            simulated="lossy",
            takes=("for", "share", "direction"),
            needs=("share",),
        ),
        "degrade": Kind(
            "link",
            "degrade:4/1@step=8,rate=20mbit,over=10s",
            "on the emulated fabric only: the rate of the cable falls to that one in ten seconds, and stays "
            "there",
            on=("fabric",),
            simulated="degrade",
            takes=("for", "rate", "over", "direction"),
            needs=("rate",),
        ),
        "jitter": Kind(
            "link",
            "jitter:4/1@step=8,delay=5ms",
            "NIC 4/1 stands still for random times of up to 5 ms, a third of the time, and catches up: what "
            "it sends and receives is late by up to that, heartbeats too",
            on=("server",),
            simulated="jitter",
            takes=("for", "delay"),
            drawable=True,
        ),
    }
)
"""Every kind of fault that is available, in the order in which messages name them."""

FLAP_S = 0.4
"""Period of a flapping cable if none is given: half of it dead, half of it alive."""
FALLS_S = 10.0
"""The time in which the rate of a degrading cable falls if none is given, in seconds."""
JITTER_S = 0.005
"""The longest delay of a NIC with jitter if none is given, in seconds."""
