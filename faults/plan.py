"""A fault plan says what is to break and when, as text that can be repeated; each server reads its part.

Notation: `kind:target@when[,for=3s]`, for example `kill:4@step=20`, `freeze:2@step=5,for=3s`,
`cut:4/0@t=1.5s`, `blackhole:4/0@step=9`, `switch:0/2@step=9`, `coordinator@step=12`. A fault with `step=`
strikes in the middle of that step, one with `t=` that long after the job's first view.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import yaml

from topology import Fabric, Failure, LinkFailure, ServerFailure, SwitchFailure, UsageError, parse_failure

MIDDLE = 0.3
"""Fraction of a server's slices of a step after which the step counts as being in its middle."""

EXAMPLES = {
    "kill": "kill:4@step=20",
    "freeze": "freeze:2@step=5,for=3s",
    "cut": "cut:4/0@t=1.5s",
    "blackhole": "blackhole:4/0@step=9",
    "switch": "switch:0/2@step=9",
    "coordinator": "coordinator@step=12",
}
"""One example of every kind of fault that is available, in the order in which messages name them."""

_NOT_YET = ("exit", "exception", "flap", "slow", "heal", "join")
_TARGETS = {"kill": "server", "freeze": "server", "cut": "link", "blackhole": "link", "switch": "switch"}
_SHAPE = re.compile(r"(?P<kind>[a-z]+)(:(?P<target>[^@,=]+))?@(?P<when>[^@]+)")
_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e-?[0-9]+)?)(?P<unit>ms|s)")


@dataclass(frozen=True, slots=True)
class AtStep:
    """In the middle of the step with this number."""

    step: int

    def __str__(self) -> str:
        return f"step={self.step}"


@dataclass(frozen=True, slots=True)
class AtTime:
    """So many seconds after the job's first view."""

    t_s: float

    def __str__(self) -> str:
        return f"t={_time_text(self.t_s)}"


Trigger: TypeAlias = AtStep | AtTime


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `target` is the part that breaks, None for the coordinator.

    `duration_s` is given for `freeze` only; None there means for the rest of the job.
    """

    kind: str
    target: Failure | None
    trigger: Trigger
    duration_s: float | None = None

    @property
    def level(self) -> int | None:
        """Level on which a server's NIC goes silent (cut, blackhole, switch); None for the other kinds."""
        return self.target.level if isinstance(self.target, LinkFailure | SwitchFailure) else None

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Read one fault; `str()` gives the notation back. Raises UsageError saying what is wrong with it."""
        shape = _SHAPE.fullmatch(text.strip())
        if shape is None:
            raise _wrong(text, "it does not have the form kind:target@when")
        kind = _known_kind(text, shape["kind"])
        target = _target(text, kind, shape["target"])
        settings = _settings(text, shape["when"])
        if kind in _NOT_YET:
            raise UsageError(
                f"fault '{text}': {kind} is not available yet in this version; "
                f"available: {', '.join(EXAMPLES)}"
            )
        duration_s = _duration_s(text, kind, settings.pop("for", None))
        return cls(kind, target, _trigger(text, settings), duration_s)

    def __str__(self) -> str:
        target = "" if self.target is None else ":" + str(self.target).partition(":")[2]
        duration = "" if self.duration_s is None else f",for={_time_text(self.duration_s)}"
        return f"{self.kind}{target}@{self.trigger}{duration}"


class Firing(NamedTuple):
    """A fault that strikes now, and why now."""

    fault: Fault
    why: str


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of one run, in the order given. `str()` is the notation, separated by blanks."""

    faults: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, texts: str | Iterable[str]) -> "FaultPlan":
        """Read a list of faults; a text may hold several, separated by blanks. Raises UsageError."""
        parts = [texts] if isinstance(texts, str) else texts
        return cls(tuple(Fault.parse(word) for part in parts for word in part.split()))

    @classmethod
    def load(cls, content: str) -> "FaultPlan":
        """Read the content of a YAML file: a list of faults, or a mapping with that list under `faults`.

        Raises UsageError when the content is no YAML, has another shape, or an entry is no fault.
        """
        try:
            document = yaml.safe_load(content)
        except yaml.YAMLError as error:
            raise UsageError(f"the fault plan is not YAML: {error}") from error
        entries = document.get("faults") if isinstance(document, dict) else document
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise UsageError(
                "a fault plan in YAML is a list of texts, one fault a line, like '- kill:4@step=20'; "
                f"this one is {document!r:.80}"
            )
        return cls.parse(entries)

    @classmethod
    def draw(
        cls,
        seed: int,
        fabric: Fabric,
        steps: int,
        count: int = 2,
        kinds: Iterable[str] = ("kill", "blackhole"),
    ) -> "FaultPlan":
        """Draw `count` faults at different steps of a run of `steps` steps; equal seeds give equal plans.

        The run can survive them: what is left stays connected and has more than half of the servers. A drawn
        freeze lasts for the rest of the job. Raises UsageError for unknown kinds and when `count` faults
        cannot be placed so.
        """
        chosen = list(kinds)
        for kind in chosen:
            if kind not in EXAMPLES:
                raise UsageError(f"cannot draw '{kind}' faults; available: {', '.join(EXAMPLES)}")
        if not chosen or not 0 <= count < steps:
            raise UsageError(
                f"cannot draw {count} faults of kinds {chosen} in {steps} steps: fewer faults than steps"
            )
        rng = np.random.Generator(np.random.PCG64(seed))
        at_steps = sorted(rng.choice(np.arange(1, steps), count, replace=False).tolist())
        faults, left = [], fabric
        for step in at_steps:
            kind, target = _draw_part(rng, left, chosen, fabric)
            left = left if target is None else left.without(target)
            faults.append(Fault(kind, target, AtStep(step)))
        return cls(tuple(faults))

    def validate(self, fabric: Fabric) -> None:
        """Check that the fabric has every target; raises UsageError naming the fault and the part."""
        for fault in self.faults:
            if fault.target is None:
                continue
            try:
                fabric.without(fault.target)
            except UsageError as error:
                raise UsageError(f"fault '{fault}': {error}") from error

    def for_server(self, server: int, fabric: Fabric) -> tuple[Fault, ...]:
        """The faults that `server` executes on itself: its own death and freeze, and the silence of its NICs.

        For a dead switch, each of its servers silences its own NIC on that level (`Fault.level`).
        """
        return tuple(fault for fault in self.faults if _touches(fault, server, fabric))

    @property
    def for_coordinator(self) -> tuple[Fault, ...]:
        """The faults that hit the coordinator; the lowest live server executes them."""
        return tuple(fault for fault in self.faults if fault.target is None)

    def __len__(self) -> int:
        """Number of faults."""
        return len(self.faults)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __str__(self) -> str:
        return " ".join(str(fault) for fault in self.faults)


def due(
    faults: Iterable[Fault], step: int, progress: float, now_s: float
) -> tuple[tuple[Firing, ...], tuple[Fault, ...]]:
    """Decide which faults strike now: (those, with the reason; those that are still to come).

    `progress` is the fraction of this server's slices of `step` that were handled (0..1), `now_s` the seconds
    since the job's first view. Pass the second part back in at the next call: so each fault strikes once.
    A fault whose step went by between two calls strikes late rather than never.
    """
    firings, pending = [], []
    for fault in faults:
        why = _why_now(fault.trigger, step, progress, now_s)
        if why is None:
            pending.append(fault)
        else:
            firings.append(Firing(fault, why))
    return tuple(firings), tuple(pending)


def _why_now(trigger: Trigger, step: int, progress: float, now_s: float) -> str | None:
    if isinstance(trigger, AtTime):
        return f"{now_s:.3f} s since the first view" if now_s >= trigger.t_s else None
    if step == trigger.step and progress >= MIDDLE:
        return f"{progress:.0%} of step {step} was handled"
    return f"step {trigger.step} has passed, this is step {step}" if step > trigger.step else None


def _touches(fault: Fault, server: int, fabric: Fabric) -> bool:
    match fault.target:
        case ServerFailure(of) | LinkFailure(of, _):
            return of == server
        case SwitchFailure(level, group):
            return fabric.group(server, level) == group
        case None:
            return False


def _draw_part(
    rng: np.random.Generator, left: Fabric, kinds: list[str], whole: Fabric
) -> tuple[str, Failure | None]:
    """Draw a kind, then one of its parts whose loss can be survived; another kind if it has none."""
    for at in rng.permutation(len(kinds)).tolist():
        if kinds[at] == "coordinator":
            return kinds[at], None
        survivable = [
            part for part in _parts(left, _TARGETS[kinds[at]]) if _survives(left.without(part), whole)
        ]
        if survivable:
            return kinds[at], survivable[int(rng.integers(len(survivable)))]
    raise UsageError(
        f"no further {' or '.join(kinds)} can be drawn on {left}: "
        "the rest would fall apart; draw fewer faults"
    )


def _parts(left: Fabric, what: str) -> list[Failure]:
    if what == "server":
        return [ServerFailure(server) for server in left.servers]
    if what == "link":
        return [LinkFailure(server, level) for server, level in left.links]
    return [SwitchFailure(level, group) for level, group in left.switches]


def _survives(left: Fabric, whole: Fabric) -> bool:
    return left.is_connected and 2 * len(left.servers) > len(whole.servers)


def _wrong(text: str, reason: str, kind: str | None = None) -> UsageError:
    example = EXAMPLES.get(kind or "kill", EXAMPLES["kill"])
    return UsageError(f"'{text}' is not a fault: {reason}; write it like {example}")


def _known_kind(text: str, kind: str) -> str:
    if kind in EXAMPLES or kind in _NOT_YET:
        return kind
    raise _wrong(text, f"there is no kind '{kind}', only {', '.join(EXAMPLES)}")


def _target(text: str, kind: str, target: str | None) -> Failure | None:
    """Read the part that breaks; kinds that are not available yet take any target."""
    if kind == "coordinator" and target is not None:
        raise _wrong(text, "the coordinator takes no target", kind)
    if kind not in _TARGETS:
        return None
    if target is None:
        raise _wrong(text, f"it does not say which {_TARGETS[kind]}", kind)
    try:
        return parse_failure(f"{_TARGETS[kind]}:{target}")
    except UsageError:
        form = {"server": "server", "link": "server/level", "switch": "level/group"}[_TARGETS[kind]]
        raise _wrong(text, f"'{target}' is no {form}, with numbers counted from 0", kind) from None


def _settings(text: str, when: str) -> dict[str, str]:
    """Split `step=5,for=3s` into its settings, each given once."""
    settings: dict[str, str] = {}
    for part in when.split(","):
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise _wrong(text, f"'{part}' is no setting of the form name=value")
        if name in settings:
            raise _wrong(text, f"'{name}' is given twice")
        settings[name] = value
    return settings


def _trigger(text: str, settings: dict[str, str]) -> Trigger:
    unknown = sorted(settings.keys() - {"step", "t"})
    if unknown:
        raise _wrong(text, f"'{unknown[0]}' is no setting of it, there are step, t and for")
    if len(settings) != 1:
        raise _wrong(text, "it needs exactly one of step=NUMBER and t=TIME")
    if "t" in settings:
        return AtTime(_seconds(text, settings["t"]))
    if not re.fullmatch(r"[0-9]{1,12}", settings["step"]):
        raise _wrong(text, f"'{settings['step']}' is no step, a number counted from 0")
    return AtStep(int(settings["step"]))


def _duration_s(text: str, kind: str, value: str | None) -> float | None:
    if value is not None and kind != "freeze":
        raise _wrong(text, f"only freeze takes for=TIME, {kind} lasts for the rest of the job", kind)
    return None if value is None else _seconds(text, value)


def _seconds(text: str, value: str) -> float:
    time = _TIME.fullmatch(value)
    if time is None:
        raise _wrong(text, f"'{value}' is no time; a time has a unit, like 1.5s or 200ms", "cut")
    return float(time["number"]) / (1000 if time["unit"] == "ms" else 1)


def _time_text(seconds: float) -> str:
    return f"{seconds!r}s".replace(".0s", "s")
