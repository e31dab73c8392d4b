"""What the page shows of a job: made from its status (docs/reference/formats.md). Pure, ready for JSON."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from bml.errors import FabricError
from bml.faults.detour import shortest_paths
from bml.predict.words import duration, milliseconds, warned
from bml.topology import Fabric, Failure, LinkFailure, SwitchFailure, parse
from bml.web.parts import Nic, Parts, Server
from bml.web.words import SAID, TROUBLE, WORST_FIRST, State, listed, plural

_MOST_DETOURS = 12
_PACE_S = 5.0  # the pace that is shown is the mean over so long


@dataclass(frozen=True)
class Trouble:
    """A part that is not well: `part` as faults name it (`4`, `4/0`, `switch 0/2`), and one sentence."""

    kind: str
    part: str
    state: State
    text: str


@dataclass(frozen=True)
class Detour:
    """A shortest live way between two servers that are no longer one hop apart.

    `hops` are (from server, level, to server).
    """

    source: int
    target: int
    hops: list[tuple[int, int, int]]
    text: str


@dataclass(frozen=True)
class Page:
    """Everything on the page that changes often.

    `mood`: starting, fine, hurt, changing, well, ended (it was asked to) or failed. `now_s`: when the
    launcher said so. It differs from page to page, by which a browser knows what is new.
    """

    job: str
    mood: str
    headline: str
    step: int = 0
    steps_per_s: float | None = None
    phase: str = ""
    epoch: int = 0
    reason: str = ""
    about: str = ""
    now_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    servers: list[Server] = field(default_factory=list)
    dead_switches: list[str] = field(default_factory=list)
    trouble: list[Trouble] = field(default_factory=list)
    detours: list[Detour] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    predicted: list[list[str]] = field(default_factory=list)
    ended: bool = False


class Pace:
    """How fast steps go: from the newest step and the time at which it was seen, in seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def per_s(self, step: int, now_s: float) -> float | None:
        """Steps per second over the last five seconds; None if that is not known yet."""
        self._seen.append((now_s, step))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= _PACE_S:
            self._seen.popleft()
        if now_s - self._seen[0][0] > 2 * _PACE_S:  # nobody looked meanwhile
            self._seen.popleft()
        since_s, first = self._seen[0]
        return None if now_s - since_s < 1.0 else round(max(0, step - first) / (now_s - since_s), 2)


def page_of(status: dict[str, Any], pace: Pace, now_s: float) -> Page:
    """Make the page of a job that runs, or has just ended, from its status."""
    fabric = parse(status["fabric"])
    parts = Parts(status, fabric)
    servers, trouble = parts.servers, troubles(parts)
    step = max([int(status.get("step", 0)), *(each.step or 0 for each in servers)])
    state = str(status.get("state", "starting"))
    runs = bool(parts.epoch or status.get("views"))  # a new coordinator does not know the view at once
    mood = "starting"
    if runs:
        mood = "hurt" if trouble else "fine"
    if runs and (state in ("freezing", "proposing", "gathering") or not parts.epoch):
        mood = "changing"
    return Page(
        job=str(status["job"]),
        mood=mood,
        headline=_headline(parts, mood, trouble),
        step=step,
        steps_per_s=pace.per_s(step, now_s),
        phase=phase_in_words(servers),
        epoch=parts.epoch,
        reason=str(status.get("reason", "")),
        about=_about(status, parts),
        now_s=round(now_s, 3),
        counts=_counts(servers),
        servers=servers,
        dead_switches=[f"{level}/{group}" for level, group in sorted(parts.dead_switches)],
        trouble=trouble,
        detours=list(detours(fabric, tuple(sorted(parts.failures)))),
        warnings=[warned(each) for each in status.get("warnings", ())],
        predicted=_to_come(status),
    )


def starting(text: str, now_s: float) -> Page:
    """Make the page of a job of which no server runs yet."""
    return Page("", "starting", text, now_s=round(now_s, 3))


def ended(before: dict[str, Any], outcome: dict[str, Any]) -> dict[str, Any]:
    """Make the last page of a job from the page before, and from how it ended (see Job.outcome).

    A job that ended well has made the steps of its program, which its headline names, too; servers count
    those of the runtime with them. Of one that failed, those that reported may know less than the page does.
    """
    well = bool(outcome["ended_well"])
    mood = "well" if well else "ended" if outcome.get("interrupted") else "failed"
    said = {
        "well": "The job has ended well: {}.",
        "ended": "The job was ended: {}",
        "failed": "The job has failed: {}",
    }
    step = int(outcome["steps"]) if well else max(int(before["step"]), int(outcome.get("steps", 0)))
    over = {"ended": True, "mood": mood, "headline": said[mood].format(outcome["text"]), "step": step}
    return {**before, **over, "phase": "", "steps_per_s": None, "predicted": []}


def left(before: dict[str, Any], text: str) -> dict[str, Any]:
    """Make the last page of a job that goes on, from the page before."""
    return {**before, "ended": True, "headline": text, "steps_per_s": None}


def as_json(page: Page) -> dict[str, Any]:
    """Return a page as plain values."""
    return asdict(page)


# --- words ---------------------------------------------------------------------------------------


def _headline(parts: Parts, mood: str, trouble: list[Trouble]) -> str:
    if mood == "starting":
        return "The servers start"
    if mood == "changing":
        return "The servers agree on the next view"
    n_members = len(parts.members)
    if not trouble:
        return f"All {plural(n_members, 'server')} work" if n_members > 1 else "The server works"
    by_kind = Counter((each.kind, each.state) for each in trouble)
    said = [
        f"{plural(by_kind[kind, state], word)} {_short(state)}"
        for state in WORST_FIRST
        for kind, word in (("server", "server"), ("switch", "switch"), ("nic", "NIC"))
        if by_kind[kind, state]
    ]
    return f"{n_members} of {parts.fabric.n_servers} servers in the view; {', '.join(said)}"


def _short(state: State) -> str:
    return {"silent": "without an answer", "joining": "joining"}.get(state, state)


def phase_in_words(servers: list[Server]) -> str:
    """Say what the servers do: one phase, or how many are in each."""
    phases = Counter(each.phase or "idle" for each in servers if each.step is not None)
    if len(phases) == 1:
        return next(iter(phases))
    return ", ".join(f"{phase} on {number}" for phase, number in phases.most_common(3))


def _about(status: dict[str, Any], parts: Parts) -> str:
    transports = sorted(
        {
            each["transport"]["name"]
            for each in parts.answers.values()
            if isinstance(each.get("transport"), dict)
        }
    )
    where = f"on the emulated fabric {status['emulated']}" if status.get("emulated") else ""
    return ", ".join(
        each
        for each in (
            f"{status['fabric']}: {plural(parts.fabric.n_servers, 'server')}",
            f"algorithm {status.get('algorithm')}",
            f"launcher {status.get('launcher')}",
            f"transport {', '.join(transports)}" if transports else "",
            where,
            f"{plural(status['spares'], 'spare')} left" if status.get("spares") else "",
        )
        if each
    )


def _to_come(status: dict[str, Any]) -> list[list[str]]:
    """Say how long the job still takes, and what its steps are predicted to take; each with its name."""
    rest, steps = status.get("remaining"), status.get("predicted")
    said = []
    if rest:
        said += [
            ["Time left", duration(rest["seconds"])],
            ["Nine times in ten", f"{duration(rest['low_s'])} to {duration(rest['high_s'])}"],
            ["Done of the loop", f"{rest['done']:.0%}"],
        ]
    if steps:
        said.append(["A step, predicted", milliseconds(steps["step_s"])])
        if steps["measured_s"] is not None:
            took = f"{milliseconds(steps['measured_s'])} ({plural(steps['steps'], 'step')})"
            said.append(["A step, measured", took])
        said.append(["From", steps["basis"]])
    return said


# --- what is the matter --------------------------------------------------------------------------


def _counts(servers: list[Server]) -> dict[str, int]:
    counted = Counter(each.state for each in servers)
    return {state: counted[state] for state in WORST_FIRST if counted[state]}


def troubles(parts: Parts) -> list[Trouble]:
    """Everything that is not well, worst first: servers, switches, then NICs of servers that are not dead."""
    found = [
        Trouble(
            "server", str(each.server), each.state, f"Server {each.server} {SAID[each.state]}: {each.why}"
        )
        for each in parts.servers
        if each.state in TROUBLE
    ]
    found += [
        Trouble("switch", f"{level}/{group}", "dead", _switch_text(parts.fabric, level, group))
        for level, group in sorted(parts.dead_switches)
    ]
    for server in parts.servers:
        if server.state in ("working", "slow", "joining", "ended"):
            found += [_nic_trouble(server.server, nic) for nic in server.nics if _counts_alone(nic)]
    return sorted(found, key=lambda each: WORST_FIRST.index(each.state))


def _counts_alone(nic: Nic) -> bool:
    """Whether a NIC is listed: those of a dead switch are not."""
    return nic.state in TROUBLE and nic.why != "its switch is dead"


def _nic_trouble(server: int, nic: Nic) -> Trouble:
    text = f"NIC {server}/{nic.level} {SAID[nic.state]}: {nic.why}"
    return Trouble("nic", f"{server}/{nic.level}", nic.state, text)


def _switch_text(fabric: Fabric, level: int, group: int) -> str:
    return f"Switch {level}/{group} is dead: it joined servers {listed(list(fabric.members(level, group)))}"


@lru_cache(maxsize=16)
def detours(fabric: Fabric, failures: tuple[Failure, ...]) -> tuple[Detour, ...]:
    """Return shortest live ways round dead NICs and switches, for pairs that have no direct hop left."""
    left = fabric.without(*failures)
    found: list[Detour] = []
    for source, target in _parted(fabric, left):
        if len(found) == _MOST_DETOURS:
            break
        try:
            hops = [*shortest_paths(left, source, target)[0]]
        except FabricError:
            continue
        over = ", ".join(f"NIC {one}/{level} to {to}" for one, level, to in hops)
        found.append(Detour(source, target, hops, f"From {source} to {target}: {over}"))
    return tuple(found)


def _parted(fabric: Fabric, left: Fabric) -> list[tuple[int, int]]:
    """Pairs of live servers, the lower one first, that were neighbours and are no longer."""
    hurt: set[tuple[int, int]] = set()
    for failure in left.failures:
        match failure:
            case LinkFailure(server, level):
                hurt.add((server, level))
            case SwitchFailure(level, group):
                hurt.update((server, level) for server in fabric.members(level, group))
            case _:
                pass
    pairs = {
        (min(server, other), max(server, other))
        for server, level in hurt
        if left.server_alive(server)
        for other in fabric.neighbours(server, level)
        if left.server_alive(other)
    }
    near = {
        server: {n for level in range(left.levels) for n in left.neighbours(server, level)}
        for server in {a for a, _ in pairs}
    }
    return sorted((a, b) for a, b in pairs if b not in near[a])
