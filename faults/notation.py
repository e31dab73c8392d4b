"""The notation of faults: the part that breaks, when it strikes, and how; read and written back as text.

    kind[:target]@when[,setting=value…]       kill:4@step=20    freeze:2@step=5,for=3s    cut:4/0@t=1.5s
    kind:target,peer=SERVER@when[,…]          stall:4/0,peer=5@step=9

`when` is one of

    step=N              the middle of step N (counted from 1), on the server that it strikes or that acts
    step=N,phase=PHASE  that part of the step: compute, reduce, broadcast, complete, recovery
    phase=PHASE         start, recovery or transfer (the first one), or shutdown
    t=1.5s              so long after the job's first view

The coordinator breaks as `coordinator@step=12` (its process gets SIGKILL), or is stopped like a server:
`freeze:coordinator@step=10,for=60s`.

Two are no faults: `leave:4@step=9` asks a server to go after that step, `join:4@step=20` starts one again.
A fault for a running job is written without `@when` and strikes at once: `kill:4`, `freeze:2,for=3s`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bml.faults.kinds import FLAP_S, KINDS
from bml.faults.settings import SETTINGS, Settings, check_time, read_seconds, write_seconds
from bml.topology import Failure, LinkFailure, SwitchFailure, UsageError, parse_failure

STEP_PHASES = ("compute", "reduce", "broadcast", "complete")
"""The parts of a step on one server, in their order: the training function computes; partial sums arrive;
results arrive; all outputs are final and the first token of the barrier is about to leave."""
RECOVERY = "recovery"
"""Between the freeze of an old view and the installation of the next one."""
TRANSFER = "transfer"
"""A server joins: it waits for the training state, or a part of it is about to leave from here."""
JOB_PHASES = ("start", RECOVERY, TRANSFER, "shutdown")
"""start: the coordinator has called and no view is in force yet; shutdown: this server's training function
has returned and the others' may not have."""


@dataclass(frozen=True, slots=True)
class AtStep:
    """In this step; in its middle, if no phase of it is given."""

    step: int
    phase: str = ""

    def __str__(self) -> str:
        return f"step={self.step}" + (f",phase={self.phase}" if self.phase else "")


@dataclass(frozen=True, slots=True)
class AtPhase:
    """When the server is first in this phase of the job."""

    phase: str

    def __str__(self) -> str:
        return f"phase={self.phase}"


@dataclass(frozen=True, slots=True)
class AtTime:
    """`t_s` seconds after the job's first view."""

    t_s: float

    def __str__(self) -> str:
        return f"t={write_seconds(self.t_s)}"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Now: for a job that is running already."""

    def __str__(self) -> str:
        return ""


Trigger: TypeAlias = AtStep | AtPhase | AtTime | AtOnce


_COORDINATOR = "coordinator"
_TRIGGERS: tuple[str, ...] = ("step", "phase", "t")
_FORMS = {"server": "server", "link": "server/level", "switch": "level/group"}
_FORM = "it does not have the form kind:target@when,setting=value (only peer= stands before @)"
_SHAPE = re.compile(
    r"(?P<kind>[a-z]+)(:(?P<target>[^@,=]+))?(?P<near>(,[a-z]+=[^@,=]+)*)((?P<mark>[@,])(?P<when>[^@]+))?"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a kind. `target` is the part that breaks, None for the coordinator; `trigger` says when.

    `settings` has the values of the settings that were given, by name; see bml.faults.settings.
    """

    kind: str
    target: Failure | None
    trigger: Trigger
    settings: Mapping[str, Any] = field(default_factory=Settings)

    def __post_init__(self) -> None:
        if not isinstance(self.settings, Settings):
            object.__setattr__(self, "settings", Settings(self.settings))

    @property
    def level(self) -> int | None:
        """Level of the NICs that it strikes; None for faults of servers and the coordinator."""
        return self.target.level if isinstance(self.target, LinkFailure | SwitchFailure) else None

    @property
    def by_anybody(self) -> bool:
        """Whether the lowest live server asks for it, as the part cannot do it to itself."""
        return KINDS[self.kind].by_anybody or self.of_coordinator

    @property
    def of_coordinator(self) -> bool:
        """Whether it strikes the coordinator."""
        return self.target is None

    @property
    def duration_s(self) -> float | None:
        """Time that it lasts, in seconds; None: for the rest of the job."""
        duration_s: float | None = self.settings.get("for")
        return duration_s

    @property
    def period_s(self) -> float:
        """Period of a flap, in seconds."""
        period_s: float = self.settings.get("every", FLAP_S)
        return period_s

    @property
    def direction(self) -> str:
        """The traffic of its NIC that it strikes: out, in or both."""
        direction: str = self.settings.get("direction", "both")
        return direction

    @property
    def peer(self) -> int | None:
        """The server at the other end of the connection that stands still."""
        peer: int | None = self.settings.get("peer")
        return peer

    @classmethod
    def parse(cls, text: str, *, at_once: bool = False) -> Fault:
        """Read one fault; `str()` gives the notation back.

        `at_once`: it is for a running job, so it may do without `@when`.

        Raises:
            UsageError: it is no fault; the message says what is wrong with it.
        """
        shape = _SHAPE.fullmatch(text.strip())
        if shape is None or (shape["mark"] != "@" and not at_once):
            raise _wrong(text, _FORM)
        kind = _known_kind(text, shape["kind"])
        target = _target(text, kind, shape["target"])
        near, when = shape["near"], shape["when"] or ""
        given = _settings(text, ",".join(part for part in (near[1:], when) if part), kind)
        if shape["mark"] == "@" and not _by_target(near):
            raise _wrong(text, _FORM)
        at = {name: given.pop(name) for name in _TRIGGERS if name in given}
        settings = _values(text, kind, given)
        return cls(kind, target, _trigger(text, kind, at, at_once), settings)

    def __str__(self) -> str:
        if self.target is None:
            target = f":{_COORDINATOR}" if KINDS[self.kind].target else ""
        else:
            target = ":" + str(self.target).partition(":")[2]
        when = f"@{self.trigger}" if str(self.trigger) else ""
        return f"{self.kind}{target}{self._written(True)}{when}{self._written(False)}"

    def _written(self, by_target: bool) -> str:
        return "".join(
            f",{name}={setting.write(self.settings[name])}"
            for name, setting in SETTINGS.items()
            if name in self.settings and setting.by_target == by_target
        )


def _wrong(text: str, reason: str, kind: str | None = None) -> UsageError:
    known = KINDS.get(kind or "kill", KINDS["kill"])
    return UsageError(f"'{text}' is not a fault: {reason}; write it like {known.example}")


def _known_kind(text: str, kind: str) -> str:
    if kind in KINDS:
        return kind
    raise _wrong(text, f"there is no kind '{kind}', only {', '.join(KINDS)}")


def _target(text: str, kind: str, target: str | None) -> Failure | None:
    """Read the part that breaks; None for the coordinator."""
    what = KINDS[kind].target
    if not what:
        if target is not None:
            raise _wrong(text, f"the {kind} takes no target", kind)
        return None
    if target is None:
        raise _wrong(text, f"it does not say which {what}", kind)
    if target == _COORDINATOR:
        if KINDS[kind].coordinator:
            return None
        others = (f"{name}:{_COORDINATOR}" for name, known in KINDS.items() if known.coordinator)
        raise _wrong(
            text, f"to the coordinator happens one of {_COORDINATOR}, {', '.join(others)}", _COORDINATOR
        )
    try:
        return parse_failure(f"{what}:{target}")
    except UsageError:
        raise _wrong(text, f"'{target}' is no {_FORMS[what]}, with numbers counted from 0", kind) from None


def _settings(text: str, listed: str, kind: str) -> dict[str, str]:
    """Split `step=5,for=3s` into its settings, each given once."""
    settings: dict[str, str] = {}
    for part in listed.split(",") if listed else ():
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise _wrong(text, f"'{part}' is no setting of the form name=value", kind)
        if name in settings:
            raise _wrong(text, f"'{name}' is given twice", kind)
        settings[name] = value
    return settings


def _by_target(near: str) -> bool:
    """Whether all that stands before `@` may stand there."""
    names = re.findall(r",([a-z]+)=", near)
    return all(name in SETTINGS and SETTINGS[name].by_target for name in names)


def _values(text: str, kind: str, given: Mapping[str, str]) -> Settings:
    """Read the settings of a kind that are given."""
    known, values = KINDS[kind], {}
    for name in given:
        if name == "for" and name not in known.takes:
            raise _wrong(text, f"{kind} takes no for=TIME, it is for the rest of the job", kind)
        if name not in known.takes:
            names = [*_TRIGGERS, *known.takes]
            raise _wrong(text, f"'{name}' is no setting of {kind}, there are {', '.join(names)}", kind)
    for name in known.needs:
        if name not in given:
            raise _wrong(text, f"{kind} needs {name}=", kind)
    for name, value in given.items():
        try:
            values[name] = SETTINGS[name].value(value)
        except ValueError as error:
            raise _wrong(text, f"'{value}' {error}", kind) from None
    return Settings(values)


def _trigger(text: str, kind: str, settings: dict[str, str], at_once: bool) -> Trigger:
    if at_once and not settings:
        return AtOnce()
    phase = settings.pop("phase", None)
    if phase is not None and "t" in settings:
        raise _wrong(text, "t=TIME and phase=PHASE do not go together", kind)
    if phase is not None and not settings:
        return AtPhase(_phase(text, kind, phase, JOB_PHASES, "phase=PHASE without step=NUMBER"))
    if len(settings) != 1:
        raise _wrong(text, "it needs exactly one of step=NUMBER and t=TIME", kind)
    if "t" in settings:
        return AtTime(_seconds(text, kind, settings["t"]))
    if not re.fullmatch(r"[0-9]{1,12}", settings["step"]) or int(settings["step"]) == 0:
        raise _wrong(text, f"'{settings['step']}' is no step, a number counted from 1", kind)
    where = (*STEP_PHASES, RECOVERY)
    return AtStep(
        int(settings["step"]), "" if phase is None else _phase(text, kind, phase, where, "a phase of a step")
    )


def _phase(text: str, kind: str, phase: str, known: tuple[str, ...], what: str) -> str:
    if phase not in known:
        raise _wrong(text, f"'{phase}' cannot be; {what} is one of {', '.join(known)}", kind)
    return phase


def _seconds(text: str, kind: str, value: str) -> float:
    try:
        seconds = read_seconds(value)
    except ValueError as error:
        raise _wrong(text, f"'{value}' {error}", kind) from None
    if wrong := check_time(seconds):
        raise _wrong(text, f"'{value}' {wrong}", kind)
    return seconds
