"""The mishaps of a simulated run, drawn from a seed: at times, or at events of the protocol."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TypeAlias

from bml.topology import Fabric, ServerFailure

FOREVER = float("inf")

#: Events of a run to which a mishap may be tied, with how often they happen in a run without trouble
#: (times the number of servers); the names in capitals are messages, when they are sent.
POINTS = {
    "submit": 4,
    "complete": 4,
    "commit": 4,
    "retry": 2,
    "installed": 2,
    "Freeze": 3,
    "Status": 3,
    "Propose": 3,
    "Accepted": 3,
    "Install": 3,
    "Evict": 0,
    "Suspect": 1,
    "Ended": 1,
    "takeover": 0,
    "Shutdown": 1,
}

#: The same while a server joins: it follows steps, the state moves, it is let in.
_JOIN_POINTS = {
    "keep": 1,
    "piece": 1,
    "state": 0,
    "CaughtUp": 0,
    "Freeze": 5,
    "Status": 5,
    "Propose": 5,
    "Accepted": 5,
    "Install": 5,
    "installed": 5,
    "submit": 20,
    "commit": 20,
}

#: The same where servers share memory.
_SHARED_POINTS = {
    "add": 4,
    "fetch": 4,
    "fetched": 4,
    "complete": 4,
    "commit": 4,
    "Install": 3,
    "installed": 3,
}


@dataclass(frozen=True)
class When:
    """`after_s` seconds after the `nth` event of this name; after the start if `point` is empty."""

    point: str
    nth: int
    after_s: float

    def __str__(self) -> str:
        tied = f"{self.point}#{self.nth}" if self.point else "start"
        return f"{tied}+{self.after_s * 1000:.3f}ms"


@dataclass(frozen=True)
class Mishap:
    """One mishap of `target`, for `for_s` seconds if it lasts.

    A mishap of one server that has no target hits the server at which the event of `when` happened.
    """

    kind: str
    target: tuple[int, ...]
    when: When
    for_s: float = FOREVER

    def __str__(self) -> str:
        target = ":" + "/".join(map(str, self.target)) if self.target else ""
        lasting = "" if self.for_s == FOREVER else f",for={self.for_s:.3f}s"
        return f"{self.kind}{target}@{self.when}{lasting}"


Mishaps: TypeAlias = tuple[Mishap, ...]

#: kind: weight. `Simulation.apply_mishap` has the effect of each.
KINDS = {
    "crash": 5,
    "freeze": 4,
    "silent": 3,
    "switch": 1,
    "reset": 2,
    "partition": 1,
    "isolate": 1,
    "control-loss": 2,
    "control-hold": 2,
    "coordinator-crash": 4,
    "coordinator-freeze": 3,
}
#: The same for paths that pass traffic in part: of one kind, or one way.
PATH_KINDS = {"stall": 4, "deaf": 2, "mute": 2, "unheard": 1, "lossy": 2}
#: Of the rank beside which the coordinator runs, with its machine or without, and of the coordinator alone.
OF_LEADERS = (
    *("leader-crash", "leader-crash", "leader-machine-freeze", "leader-machine-pause", "leader-freeze"),
    *("leader-isolate", "leader-control-hold", "leader-control-pair"),
    *("coordinator-crash", "coordinator-freeze"),
)
_BESIDE_ELECTIONS = (
    *("crash", "freeze", "machine-pause", "silent", "control-loss", "control-hold", "spare-crash", "join"),
)
_HOW_MANY = (0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 5)


def draw(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """Mishaps of one run: independent ones, or some that strike in the middle of a recovery."""
    how = chance.random()
    if how < 0.3:
        return draw_in_recovery(chance, fabric, detect_s)
    if how < 0.4:
        return _lost_witness(chance, fabric, detect_s)
    return tuple(draw_one(chance, fabric, detect_s) for _ in range(chance.choice(_HOW_MANY)))


def draw_in_recovery(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """A mishap that needs a new view, a coordinator that fails while it makes one, and perhaps a third."""
    n = fabric.n_servers
    first = Mishap(
        chance.choice(("crash", "crash", "freeze", "silent")),
        (),
        When(chance.choice(("submit", "complete", "commit")), chance.randint(1, 2 * n), 0.0),
        chance.choice((3.0, 6.0)) * detect_s,
    )
    point = chance.choice(("Freeze", "Status", "Propose", "Accepted", "Install", "Install", "installed"))
    asked = n if point == "Status" else 0  # at start-up every server says where it stands twice
    during = When(point, n + asked + chance.randint(1, n), 0.0)
    kind = chance.choice(("coordinator-crash", "coordinator-crash", "coordinator-freeze", "crash", "freeze"))
    second = Mishap(kind, _target(chance, fabric, kind), during, _for_s(chance, kind, detect_s))
    found = [replace(first, target=_target(chance, fabric, first.kind)), second]
    if chance.random() < 0.6:
        kind = chance.choice(("crash", "freeze", "isolate", "control-hold", "control-loss"))
        after_s = chance.choice((0.0, 0.003, 0.4)) * chance.random()
        third = When("fault", 2, after_s)
        found.append(Mishap(kind, _target(chance, fabric, kind), third, _for_s(chance, kind, detect_s)))
    return tuple(found)


def _lost_witness(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """A coordinator dies between two Installs, and then the servers die that know the view to be in force."""
    n = fabric.n_servers
    kind = chance.choice(("crash", "silent"))
    start = When("submit", chance.randint(1, 2 * n), 0.0)
    installs = chance.choice((1, 1, 2))
    found = [
        Mishap(kind, _target(chance, fabric, kind), start),
        Mishap("coordinator-crash", (), When("Install", n + installs, 0.0)),
    ]
    for nth in range(n + 1, n + 1 + installs):
        after_s = chance.choice((0.0, 0.0, 0.005, 0.02))
        how = chance.choice(("crash", "freeze"))
        found.append(Mishap(how, (), When("installed", nth, after_s), _for_s(chance, how, detect_s)))
    return tuple(found)


def draw_paths(chance: random.Random, fabric: Fabric, detect_s: float, others: Mishaps) -> Mishaps:
    """Paths on which some traffic passes and some does not: alone, beside a death, or beside all `others`."""
    found = [_path(chance, fabric, detect_s) for _ in range(chance.choice((1, 1, 1, 2)))]
    how = chance.random()
    if how < 0.4:
        return (*others, *found)
    if how < 0.7:
        kind = chance.choice(("crash", "freeze", "coordinator-crash", "coordinator-freeze"))
        when = When("fault", 1, chance.uniform(0, 3 * detect_s))
        found.append(Mishap(kind, _target(chance, fabric, kind), when, _for_s(chance, kind, detect_s)))
    return tuple(found)


def _path(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishap:
    kind = chance.choices(list(PATH_KINDS), list(PATH_KINDS.values()))[0]
    for_s = FOREVER if chance.random() < 0.5 else 2 * _for_s(chance, kind, detect_s)
    return Mishap(kind, _target(chance, fabric, kind), _when(chance, fabric, detect_s), for_s)


def draw_sharing(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """Over shared memory: servers that stop while they read memory that others may write next, and wake."""
    how = chance.random()
    if how < 0.15:
        found = [_at_work(chance, fabric, detect_s)]
    elif how < 0.55:
        found = _frozen_before_install(chance, fabric, detect_s)
    elif how < 0.85:
        found = _out_without_a_word(chance, fabric, detect_s)
    else:
        found = [_at_work(chance, fabric, detect_s) for _ in range(chance.choice((2, 2, 3)))]
    if chance.random() < 0.3:
        found.append(draw_one(chance, fabric, detect_s))
    return tuple(found)


def _at_work(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishap:
    """A server that stops while it adds, copies, or takes the next stage, mostly until it is evicted."""
    point = chance.choice(list(_SHARED_POINTS))
    when = When(point, chance.randint(1, _SHARED_POINTS[point] * fabric.n_servers), _moment_s(chance))
    return Mishap(
        "freeze",
        () if point != "Install" else _target(chance, fabric, "freeze"),
        when,
        _long_s(chance, detect_s),
    )


def _frozen_before_install(chance: random.Random, fabric: Fabric, detect_s: float) -> list[Mishap]:
    """A view that commits a step whose result is fetched, and servers that stop before they hear."""
    n = fabric.n_servers
    kind = chance.choice(("crash", "reset", "reset"))
    point = chance.choice(("complete", "fetch", "fetch"))
    first = When(point, n * chance.randint(1, 2), _moment_s(chance) / 4)
    found = [Mishap(kind, _target(chance, fabric, kind), first)]
    for server in chance.sample(fabric.servers, chance.choice((1, 1, 1, 2))):
        when = When("Install", n + 1, chance.choice((0.0, 0.0, 0.001)))
        found.append(Mishap("freeze", (server,), when, detect_s * chance.uniform(1.5, 5.0)))
    return found


def _out_without_a_word(chance: random.Random, fabric: Fabric, detect_s: float) -> list[Mishap]:
    """A server that stops while it adds, and goes on when the others have just evicted it, unheard."""
    point = chance.choice(("add", "add", "add", "complete"))
    when = When(point, chance.randint(1, 3 * fabric.n_servers), _moment_s(chance) / 4)
    for_s = detect_s * chance.uniform(1.2, 1.7)
    return [Mishap("control-hold", (), when, 7 * detect_s), Mishap("freeze", (), when, for_s)]


def _moment_s(chance: random.Random) -> float:
    return chance.choice((0.0, 0.0, chance.uniform(0, 0.02), chance.uniform(0, 0.1)))


def _long_s(chance: random.Random, detect_s: float) -> float:
    """A time in seconds, mostly so long that the others go on without the server, or are about to."""
    return detect_s * chance.choice(
        (chance.uniform(0.5, 2.0), chance.uniform(1.5, 4.0), chance.uniform(4.0, 7.0))
    )


def draw_absent(chance: random.Random, fabric: Fabric) -> tuple[int, ...]:
    """Draw servers that are absent at the beginning: mostly none, else one or two."""
    some = _pair(chance, fabric)[: chance.choice((0, 0, 0, 1, 2, 2))]
    together = len(fabric.without(*map(ServerFailure, some)).components()) == 1
    return tuple(sorted(some if together else some[:1]))


def _pair(chance: random.Random, fabric: Fabric) -> tuple[int, ...]:
    """Two servers, mostly neighbours."""
    server, level = chance.choice(fabric.servers), chance.randrange(fabric.levels)
    others = fabric.neighbours(server, level) if chance.random() < 0.7 else ()
    return server, chance.choice(others or [each for each in fabric.servers if each != server])


def draw_joins(
    chance: random.Random, fabric: Fabric, detect_s: float, absent: tuple[int, ...] = ()
) -> Mishaps:
    """Servers that leave and join again (or join for the first time), and mishaps meanwhile.

    Those that are `absent` come close together, so that they learn at once; so do, at times, two that were
    there before.
    """
    first_s, apart_s = chance.uniform(0.02, 0.2), chance.choice((0.0, 0.0, 0.04))
    found = [
        Mishap("join", (server,), When("", 0, first_s + chance.uniform(0, apart_s))) for server in absent
    ]
    if not found and chance.random() < 0.4:
        return _two_come_back(chance, fabric, detect_s)
    for _ in range(chance.choice((0, 1, 1, 2)) if found else chance.choice((1, 1, 2))):
        how = chance.choice(("crash", "crash", "freeze", "leave", "isolate"))
        noticed_s = 1.6 * detect_s if how in ("freeze", "isolate") else 0.06
        server = chance.choice(fabric.servers)
        n = len(found)
        gone = When("submit", chance.randint(1, 6 * fabric.n_servers), 0.0)
        found.append(Mishap(how, (server,), gone, _for_s(chance, how, detect_s)))
        back_s = noticed_s * chance.uniform(0.2, 2.0)
        found.append(Mishap("join", (server,), When("fault", n + 1, back_s)))
    for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        point = chance.choice(list(_JOIN_POINTS))
        nth = chance.randint(1, max(2, _JOIN_POINTS[point] * fabric.n_servers))
        when = When(point, nth, 0.0 if chance.random() < 0.7 else chance.uniform(0, 0.004))
        target = _target(chance, fabric, kind)
        found.append(Mishap(kind, target, when, _for_s(chance, kind, detect_s)))
        if kind == "crash" and chance.random() < 0.5:
            after = When(point, nth, chance.uniform(0.03, 0.2))
            found.append(Mishap("join", target, after))
    return tuple(found)


def _two_come_back(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """Two servers leave, and join again close together; perhaps another mishap happens meanwhile."""
    found: list[Mishap] = []
    gone = When("submit", chance.randint(1, 6 * fabric.n_servers), 0.0)
    back_s, apart_s = chance.uniform(0.1, 0.2), chance.choice((0.0, 0.0, 0.04))
    for server in _pair(chance, fabric):
        found.append(Mishap(chance.choice(("crash", "leave")), (server,), gone))
        back_s += chance.uniform(0, apart_s)
        found.append(Mishap("join", (server,), When("fault", 1, back_s)))
    if chance.random() < 0.3:
        found.append(draw_one(chance, fabric, detect_s))
    return tuple(found)


def draw_late_views(chance: random.Random, detect_s: float) -> Mishaps:
    """The view that is to let a learner contribute comes late: the coordinator stops, or does not hear it."""
    found = []
    for nth in range(1, chance.choice((2, 3, 4))):
        point = chance.choice(("CaughtUp", "CaughtUp", "state"))
        kind = "control-hold" if point == "state" and chance.random() < 0.5 else "coordinator-freeze"
        after_s = chance.choice((0.0, 0.0, 0.003)) * chance.random()
        found.append(Mishap(kind, (), When(point, nth, after_s), detect_s * chance.uniform(0.05, 0.9)))
    return tuple(found)


def draw_successions(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """Mishaps of coordinators and their launcher, and of a server for which a coordinator is needed."""
    found = []
    if chance.random() < 0.6:
        step_s = chance.choice((-3600, -60, -1, 1, 3600))
        found.append(Mishap("clock-step", (step_s,), When("", 0, chance.uniform(0, 0.02))))
    if chance.random() < 0.25:
        found.append(Mishap("coordinator-fails", (chance.choice((1, 1, 2, 4, 12)),), When("", 0, 0.0)))
    for _ in range(chance.choice((1, 1, 2))):
        kind = chance.choice(("coordinator-crash", "coordinator-freeze", "launcher-deaf"))
        for_s = FOREVER if chance.random() < 0.4 else detect_s * chance.uniform(1.0, 8.0)
        for_s = min(for_s, 4 * detect_s) if kind == "launcher-deaf" else for_s
        found.append(Mishap(kind, (), _when(chance, fabric, detect_s), for_s))
    for _ in range(chance.choice((1, 1, 1, 2))):
        kind = chance.choice(("crash", "crash", "freeze", "silent", "control-loss"))
        when = _when(chance, fabric, detect_s)
        found.append(Mishap(kind, _target(chance, fabric, kind), when, _for_s(chance, kind, detect_s)))
    if chance.random() < 0.4:
        for_s = detect_s * chance.choice((0.5, 2.0, 8.0, 20.0, FOREVER)) * chance.uniform(0.5, 1.5)
        found.append(Mishap("launcher-freeze", (), _when(chance, fabric, detect_s), for_s))
    return tuple(found)


def draw_elections(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishaps:
    """Mishaps of the ranks beside which coordinators run, one after the other, and others beside them."""
    found = []
    if chance.random() < 0.15:
        found.append(Mishap("coordinator-fails", (chance.choice((1, 1, 2, 4, 12)),), When("", 0, 0.0)))
    if chance.random() < 0.2:
        stall_s = detect_s * chance.choice((1.0, 8.0, 40.0))
        found.append(Mishap("store-stall", (), _when(chance, fabric, detect_s), stall_s))
    for _ in range(chance.choice((1, 2, 2, 2, 3))):
        kind = chance.choice(OF_LEADERS)
        when = _when(chance, fabric, detect_s)
        if found and chance.random() < 0.5:  # while the one before is noticed, or a successor is elected
            when = When("fault", len(found), detect_s * chance.uniform(0.0, 4.0))
        lasting = not kind.endswith("crash")
        for_s = detect_s * chance.uniform(0.5, 8.0) if lasting and chance.random() < 0.6 else FOREVER
        peer = [chance.choice(fabric.servers)] if kind == "leader-control-pair" else []
        found.append(Mishap(kind, tuple(peer), when, for_s))
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        kind = chance.choice(_BESIDE_ELECTIONS)
        target = _target(chance, fabric, kind)
        found.append(Mishap(kind, target, _when(chance, fabric, detect_s), _for_s(chance, kind, detect_s)))
    return tuple(found)


def draw_busy(chance: random.Random, fabric: Fabric, detect_s: float, steps: int) -> Mishaps:
    """One server is lost on a busy host, after the first steps, and perhaps the coordinator, too."""
    server, n = chance.choice(fabric.servers), fabric.n_servers
    when = When("submit", chance.randint(2 * n, steps * n), 0.0)
    how = chance.choice(("crash", "crash", "freeze"))
    found = [Mishap(how, (server,), when, FOREVER if how == "crash" else 8 * detect_s)]
    if chance.random() < 0.3:
        found.append(Mishap("coordinator-crash", (), When("fault", 1, chance.uniform(0.0, 2 * detect_s))))
    return tuple(found)


def draw_one(chance: random.Random, fabric: Fabric, detect_s: float) -> Mishap:
    """A mishap of any kind, at any moment."""
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    return Mishap(
        kind, _target(chance, fabric, kind), _when(chance, fabric, detect_s), _for_s(chance, kind, detect_s)
    )


def _when(chance: random.Random, fabric: Fabric, detect_s: float) -> When:
    how = chance.random()
    after_s = 0.0 if chance.random() < 0.5 else chance.uniform(0, 0.004)
    if how < 0.15:
        return When("", 0, chance.uniform(0, 0.15))
    if how < 0.35:  # again, while the one before is being noticed or repaired
        return When("fault", chance.choice((1, 1, 1, 2, 2, 3)), chance.uniform(0, 3 * detect_s))
    point = chance.choice(list(POINTS))
    return When(point, chance.randint(1, max(1, POINTS[point] * fabric.n_servers)), after_s)


def _for_s(chance: random.Random, kind: str, detect_s: float) -> float:
    """A time in seconds: too short to be noticed, about as long as the detector takes, or much longer."""
    some_s = detect_s * chance.choice((0.1, 0.5, 1.0, 1.5, 2.5, 4.0, 7.0)) * chance.uniform(0.8, 1.2)
    if kind in ("silent", "switch", "partition"):
        return FOREVER if chance.random() < 0.6 else some_s
    return FOREVER if kind in ("crash", "reset", "control-loss", "coordinator-crash") else some_s


def _target(chance: random.Random, fabric: Fabric, kind: str) -> tuple[int, ...]:
    server = chance.choice(fabric.servers)
    # On a ring of odd length some server has no neighbour on a level.
    level = chance.choice([each for each in range(fabric.levels) if fabric.neighbours(server, each)])
    match kind:
        case "silent" | "deaf" | "mute":
            return server, level
        case "switch":
            return level, fabric.group(server, level)
        case "reset" | "stall" | "unheard" | "lossy":
            peers = fabric.neighbours(server, level)
            return server, chance.choice(peers), level
        case "partition":
            size = chance.randint(1, max(1, fabric.n_servers // 2))
            return tuple(sorted(chance.sample(fabric.servers, size)))
        case "coordinator-crash" | "coordinator-freeze":
            return ()
    return (server,)
