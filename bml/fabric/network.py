"""The emulated fabric as an object: bring it up, break and heal it, take it down."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bml.fabric import bpf, inventory, namespace, state
from bml.fabric.condition import BURST_NBYTES, Condition, Damage
from bml.fabric.layout import (
    DEFAULT_NAME,
    SWITCHES,
    Layout,
    check_name,
    node_of,
    parse_rate,
    rate_text,
)
from bml.fabric.state import State
from bml.topology import Fabric, parse
from bml.topology.errors import BmlError, FabricError, UsageError

DEFAULT_RATE = "200mbit"
Rate = str | int
"""A rate in bits per second, or a text such as `200mbit`."""

#: The fabric that is made to test whether one can be, and the seconds to wait for another command then.
_PROBED = "switch:2"
_PATIENCE_S = 2.0  # another command holds the lock for milliseconds


@dataclass(frozen=True)
class EmulatedFabric:
    """An emulated fabric that is up. Several processes may use it; each change is made under a lock.

    All methods that change something need root. They raise FabricError if the fabric is not up any more,
    UsageError if it has no such part.
    """

    layout: Layout

    @property
    def name(self) -> str:
        """Its name on this machine."""
        return self.layout.name

    @property
    def fabric(self) -> Fabric:
        """Its shape, without damage."""
        return self.layout.fabric

    @property
    def condition(self) -> Condition:
        """Its present rates and damages. Raises FabricError if it is not up."""
        return inventory.complete(self.name).condition

    def shape(self, rate: Rate | None = None, one_switch_rate: Rate | None = None) -> None:
        """Set the rate of every cable of the fabric, or of the one-switch network; slow ones stay slow.

        Raises UsageError for a rate that cannot be, FabricError if the fabric is not up.
        """
        rate_bit, one_switch_bit = _bits(rate), _bits(one_switch_rate)
        self._change(
            lambda now: replace(
                now,
                rate_bit=rate_bit or now.rate_bit,
                one_switch_bit=one_switch_bit or now.one_switch_bit,
            )
        )

    def cut(self, server: int, level: int) -> None:
        """Cut the cable of a NIC: the NIC has no carrier, the other side hears nothing."""
        self.damage(Damage("cut", (server, level)))

    def blackhole(self, server: int, level: int) -> None:
        """Drop all packets on a cable, both ways; no end notices it."""
        self.damage(Damage("blackhole", (server, level)))

    def slow(self, server: int, level: int, rate: Rate, direction: str = "both") -> None:
        """Give one cable a lower rate: for what its NIC sends (`out`), receives (`in`), or both.

        Raises UsageError for a rate or a direction that cannot be.
        """
        self.damage(Damage("slow", (server, level), _bits(rate) or 0, direction=direction))

    def lose(self, server: int, level: int, share: float, direction: str = "both") -> None:
        """Drop this fraction (0.000001..1) of what the NIC sends (`out`), receives (`in`), or both.

        Raises UsageError for a share or a direction that cannot be, FabricError if the kernel cannot.
        """
        self.damage(Damage("loss", (server, level), share=share, direction=direction))

    def switch_down(self, level: int, group: int) -> None:
        """Take a switch down: no NIC on it has a carrier."""
        self.damage(Damage("switch", (level, group)))

    def heal(self, server: int, level: int) -> None:
        """Undo all damages of a cable; a cable at a dead switch stays dead."""
        self.mend(Damage("cut", (server, level)))

    def switch_up(self, level: int, group: int) -> None:
        """Undo `switch_down`; cables that were broken themselves stay so."""
        self.mend(Damage("switch", (level, group)))

    def heal_all(self) -> None:
        """Undo all damage. Raises FabricError if the fabric is not up."""
        self._change(Condition.unharmed)

    def damage(self, damage: Damage) -> None:
        """Do this damage by hand; it replaces the damages that its part had before, also those of jobs."""
        damage.cables(self.layout)
        if damage.kind == "loss":
            bpf.check()
        self._change(lambda now: now.damaged(damage))

    def apply(self, damage: Damage, job: str) -> bool:
        """Do this damage for a job, beside those that its part has.

        Returns False if it was done by hand before, and so is not the job's to undo.
        """
        damage.cables(self.layout)
        if damage.kind == "loss":
            bpf.check()
        return (damage, job) in self._change(lambda now: now.with_damage(damage, job)).holds

    def undo(self, damage: Damage, job: str) -> None:
        """End what this job did by `apply`. The damage stays as long as another job holds it."""
        self._change(lambda now: now.without_damage(damage, job))

    def mend(self, damage: Damage) -> None:
        """Undo all damages of this part."""
        damage.cables(self.layout)
        self._change(lambda now: now.healed(damage))

    def has_carrier(self, server: int, level: int) -> bool:
        """Whether this NIC has a carrier now."""
        return bool(inventory.netlink().carrier(self.layout, server, level))

    def namespace(self, server: int) -> str:
        """The name of a server's namespace."""
        return self.layout.namespace(node_of(server))

    def namespace_path(self, server: int | None) -> str:
        """The file by which a server's namespace is entered; for None, that of the switches."""
        return namespace.path_of(self.layout.namespace(SWITCHES if server is None else node_of(server)))

    def status(self) -> dict[str, Any]:
        """The state of the fabric, ready for JSON; `rate` and `one_switch_rate` are in bits per second."""
        now = self.condition
        return {
            "name": self.name,
            "fabric": self.fabric.name,
            "servers": self.fabric.n_servers,
            "switches": 0 if self.layout.is_direct else len(self.fabric.switches),
            "rate": now.rate_bit,
            "one_switch_rate": now.one_switch_bit,
            "failures": [str(damage) for damage in sorted(now.damages)],
            "addresses": {
                server: {
                    "namespace": self.namespace(server),
                    "nics": list(self.layout.nics(server)),
                    "one_switch": self.layout.one_switch_address(server),
                    "management": self.layout.management_address(server),
                }
                for server in self.fabric.servers
            },
        }

    def kill_machine(self, server: int) -> int:
        """Kill every process in a server's namespace; returns their number.

        Raises FabricError if the namespace is not one of this fabric.
        """
        space = self.namespace(server)
        if not (namespace.is_alive(space) and inventory.netlink().is_ours(space, self.name)):
            raise FabricError(f"bml did not make the network namespace {space}: nothing in it is killed")
        return namespace.kill(space)

    def down(self) -> dict[int, str]:
        """Remove it; see the function `down`."""
        return down(self.name)

    def _change(self, change: Callable[[Condition], Condition]) -> Condition:
        """Change the condition; returns the new one."""
        with state.locked():
            known = inventory.complete(self.name)
            if known.fabric != self.fabric.name:
                raise FabricError(f"{self.name} is a {known.fabric} now, not a {self.fabric.name} any more")
            condition = change(known.condition)
            changed = condition.damages ^ known.condition.damages
            touched = {cable for damage in changed for cable in damage.cables(self.layout)}
            everything = condition.rates != known.condition.rates
            # Saved first: if this is interrupted, the next change of the part, or heal, corrects it.
            state.save(self.name, replace(known, condition=condition))
            inventory.netlink().settle(self.layout, self.layout.cables if everything else touched, condition)
            lossy = {cable for each in changed if each.kind == "loss" for cable in each.cables(self.layout)}
            if lossy:
                inventory.netlink().settle_loss(self.layout, lossy, condition)
            return condition


def up(
    fabric: Fabric | str,
    rate: Rate = DEFAULT_RATE,
    *,
    one_switch_rate: Rate | None = None,
    name: str = DEFAULT_NAME,
    maker: int = 0,
    burst_nbytes: int = BURST_NBYTES,
) -> EmulatedFabric:
    """Bring up an emulated fabric on this machine; if it is up already, nothing changes.

    `rate` is that of every NIC, each way; `one_switch_rate` that of the one-switch network beside it
    (default: the same). Remains of an interrupted call are removed first. `maker` is the id of the process
    that will take the fabric down. Other processes may use it, but when the maker has ended the fabric is an
    orphan: the next one that is brought up on this machine, whatever its name, removes it. After a rest a NIC
    may send `burst_nbytes` at once; see `bml.fabric.condition.short_burst`.

    Raises UsageError for a fabric or a rate that cannot be, FabricError without root or pyroute2, if another
    fabric, or one with other rates, is up under this name, or if namespaces with its names are not ours.
    """
    layout = Layout(parse(fabric) if isinstance(fabric, str) else fabric, name)
    rate_bit = _bits(rate) or 0
    condition = Condition(rate_bit, _bits(one_switch_rate) or rate_bit, burst_nbytes=burst_nbytes)
    with state.locked():
        remove_orphans()
        inventory.refuse_others(name)
        known = inventory.known(name)
        if known is not None:
            inventory.refuse_a_jobs(name, known)
        if known is not None and known.complete:
            _check_same(known, layout, condition)
            return EmulatedFabric(layout)
        return build(layout, condition, maker, False)


def build(layout: Layout, condition: Condition, maker: int, alone: bool) -> EmulatedFabric:
    """Make a fabric in place of the remains of one; this is the part of `up` under the lock."""
    name, netlink = layout.name, inventory.netlink()
    inventory.refuse_others(name)
    netlink.destroy(inventory.ours(name))
    state.save(name, State.of(layout.fabric.name, condition, False, maker, alone))
    try:
        netlink.build(layout, condition)
    except BaseException:
        namespace.in_thread(lambda: _remove(name))
        raise
    state.save(name, State.of(layout.fabric.name, condition, True, maker, alone))
    return EmulatedFabric(layout)


def find(name: str = DEFAULT_NAME) -> EmulatedFabric:
    """The emulated fabric that is up under this name. Raises FabricError if there is none."""
    return EmulatedFabric(Layout(parse(inventory.complete(check_name(name)).fabric), name))


def is_up(name: str = DEFAULT_NAME) -> bool:
    """Whether a complete fabric is up under this name."""
    known = inventory.known(check_name(name))
    return known is not None and known.complete


def down(name: str = DEFAULT_NAME) -> dict[int, str]:
    """Remove this fabric, complete or not; no effect if there is none.

    Returns the processes (pid -> command) that still run inside it, without a network. Raises FabricError if
    it was made for a job of another process, which still runs. It also raises FabricError, when the fabric is
    gone, if other programs made namespaces with its names: they stay.
    """
    check_name(name)
    with state.locked():
        found = state.load(name)
        if found is not None and found.maker != os.getpid():
            inventory.refuse_a_jobs(name, found)
        left = namespace.in_thread(lambda: _remove(name))
        inventory.refuse_others(name)
        return left


def obstacle() -> str | None:
    """The reason why this process cannot bring up an emulated fabric; None if it can."""
    rate_bit = parse_rate(DEFAULT_RATE)
    layout = Layout(parse(_PROBED), f"probe{os.getpid()}")
    try:
        with state.locked(_PATIENCE_S):
            remove_orphans()
            try:
                build(layout, Condition(rate_bit, rate_bit), os.getpid(), True)
            finally:
                namespace.in_thread(lambda: _remove(layout.name))
    except BmlError as error:
        return str(error)
    return None


def remove_orphans() -> None:
    """Remove the fabrics whose makers have ended without taking them down; call under the lock."""
    for name in inventory.orphans():
        namespace.in_thread(lambda name=name: _remove(name))  # type: ignore[misc]


def _remove(name: str) -> dict[int, str]:
    """Remove this fabric's own namespaces; this is the part of `down` under the lock."""
    left: dict[int, str] = inventory.netlink().destroy(inventory.ours(name))
    state.forget(name)
    return left


def _check_same(known: State, layout: Layout, condition: Condition) -> None:
    now = known.condition
    if known.fabric != layout.fabric.name:
        raise FabricError(
            f"a {known.fabric} is up already as {layout.name}: take it down with bml fabric "
            f"down{inventory.named(layout.name)}, or give this one another --name"
        )
    if now.rates != condition.rates:
        was, wanted = (
            f"{rate_text(each.rate_bit)} and {rate_text(each.one_switch_bit)}" for each in (now, condition)
        )
        raise FabricError(
            f"{layout.name} is up already with {was} (its own cables, one-switch network), not {wanted}: "
            f"bml fabric shape{inventory.named(layout.name)} changes that"
        )


def _bits(rate: Rate | None) -> int | None:
    if rate is None or isinstance(rate, str):
        return None if rate is None else parse_rate(rate)
    if rate <= 0:
        raise UsageError(f"the rate is {rate} bit/s: give more than 0")
    return parse_rate(f"{rate}bit")
