"""How one fault is written: what breaks, when it strikes, and how; read and written back as text.

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

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import NoReturn, TypeAlias

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
    """So many seconds after the job's first view."""

    t_s: float

    def __str__(self) -> str:
        return f"t={_time_text(self.t_s)}"


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Now: for a job that is running already."""

    def __str__(self) -> str:
        return ""


Trigger: TypeAlias = AtStep | AtPhase | AtTime | AtOnce


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known about one kind of fault: the part it breaks, and the settings that it takes."""

    target: str
    """server, link, switch, or nothing for the coordinator."""
    example: str
    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    emulated: bool = False
    """Whether it needs cables that can really be broken, or machines."""
    by_anybody: bool = False
    """Whether the part cannot do it to itself: the lowest live server has it done."""
    coordinator_too: bool = False
    """Whether it can strike the coordinator in place of a server, as the target `coordinator`."""


_COORDINATOR = "coordinator"
_LASTING = ("for",)
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "kill": Kind("server", "kill:4@step=20"),
        "freeze": Kind("server", "freeze:2@step=5,for=3s", _LASTING, coordinator_too=True),
        "cut": Kind("link", "cut:4/0@t=1.5s", _LASTING),
        "blackhole": Kind("link", "blackhole:4/0@step=9", _LASTING),
        "stall": Kind("link", "stall:4/0,peer=5@step=9,for=3s", ("for", "peer"), needs=("peer",)),
        "switch": Kind("switch", "switch:0/2@step=9", _LASTING),
        "coordinator": Kind("", "coordinator@step=12", by_anybody=True),
        "leave": Kind("server", "leave:4@step=9"),
        "join": Kind("server", "join:4@step=20", by_anybody=True),
        "exception": Kind("server", "exception:4@step=9"),
        "exit": Kind("server", "exit:4@step=9"),
        "gil": Kind("server", "gil:4@step=9,for=2s", _LASTING, needs=_LASTING),
        "flap": Kind("link", "flap:4/0@step=9,every=0.4s,for=4s", ("for", "every")),
        "node": Kind("server", "node:4@step=20", emulated=True),
        "slow": Kind("link", "slow:4/1@step=8,rate=10mbit", ("for", "rate"), needs=("rate",), emulated=True),
        "loss": Kind("link", "loss:4/1@step=8,share=5%", ("for", "share"), needs=("share",), emulated=True),
    }
)
"""Every kind of fault that is available, in the order in which messages name them."""

FLAP_S = 0.4
"""Period of a flapping cable if none is given: half of it dead, half of it alive."""

_FORMS = {"server": "server", "link": "server/level", "switch": "level/group"}
_SHAPE = re.compile(
    r"(?P<kind>[a-z]+)(:(?P<target>[^@,=]+))?(,peer=(?P<peer>[^@,=]+))?((?P<mark>[@,])(?P<when>[^@]+))?"
)
_TIME = re.compile(r"(?P<number>[0-9]+(\.[0-9]*)?(e-?[0-9]+)?)(?P<unit>ms|s)")
_RATE = re.compile(r"(?P<number>[0-9]{1,12}(\.[0-9]{1,12})?)(?P<unit>[kmg]?)bit")
_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_LEAST_BIT, _MOST_BIT = 8 * 10**3, 10 * 10**9
_SHARE = re.compile(r"(?P<number>[0-9]{1,3}(\.[0-9]{1,4})?)%")
_MOST_S = 1_000_000
"""The longest time that can be given, in seconds: eleven days."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `target` is the part that breaks, None for the coordinator.

    `duration_s` None: for the rest of the job. `every_s` is the period of a flap, `rate_bit` what is left
    of a slow cable in bits per second, `share` the lost fraction (0..1) of its packets, `peer` the server at
    the other end of the connection that stands still.
    """

    kind: str
    target: Failure | None
    trigger: Trigger
    duration_s: float | None = None
    every_s: float | None = None
    rate_bit: int | None = None
    share: float | None = None
    peer: int | None = None

    @property
    def level(self) -> int | None:
        """Level of the NICs that it strikes; None for faults of servers and the coordinator."""
        return self.target.level if isinstance(self.target, LinkFailure | SwitchFailure) else None

    @property
    def by_anybody(self) -> bool:
        """Whether the lowest live server has it done, as the part cannot do it to itself."""
        return KINDS[self.kind].by_anybody or self.of_coordinator

    @property
    def of_coordinator(self) -> bool:
        """Whether it strikes the coordinator."""
        return self.target is None

    @property
    def period_s(self) -> float:
        """Period of a flap."""
        return self.every_s or FLAP_S

    @classmethod
    def parse(cls, text: str, *, at_once: bool = False) -> "Fault":
        """Read one fault; `str()` gives the notation back. Raises UsageError saying what is wrong with it.

        `at_once`: it is for a running job, so it may do without `@when`.
        """
        shape = _SHAPE.fullmatch(text.strip())
        if shape is None or (shape["mark"] != "@" and not at_once):
            raise _wrong(text, "it does not have the form kind:target@when")
        kind = _known_kind(text, shape["kind"])
        target = _target(text, kind, shape["target"])
        settings = _settings(text, shape["when"] or "", kind)
        if shape["peer"] is not None and "peer" in settings:
            raise _wrong(text, "'peer' is given twice", kind)
        how = {name: settings.pop(name, None) for name in ("for", "every", "rate", "share")}
        how["peer"] = settings.pop("peer", None) or shape["peer"]
        _check_settings(text, kind, {name for name, value in how.items() if value is not None})
        return cls(
            kind,
            target,
            _trigger(text, kind, settings, at_once),
            duration_s=how["for"] and _seconds(text, how["for"]),  # type: ignore[arg-type]
            every_s=how["every"] and _period_s(text, how["every"]),  # type: ignore[arg-type]
            rate_bit=how["rate"] and _rate_bit(text, how["rate"]),  # type: ignore[arg-type]
            share=how["share"] and _share(text, how["share"]),  # type: ignore[arg-type]
            peer=None if how["peer"] is None else _server(text, kind, how["peer"]),
        )

    def __str__(self) -> str:
        if self.target is None:
            target = f":{_COORDINATOR}" if KINDS[self.kind].target else ""
        else:
            target = ":" + str(self.target).partition(":")[2]
        target += "" if self.peer is None else f",peer={self.peer}"
        when = f"@{self.trigger}" if str(self.trigger) else ""
        how = {
            "every": None if self.every_s is None else _time_text(self.every_s),
            "rate": None if self.rate_bit is None else _rate_text(self.rate_bit),
            "share": None if self.share is None else share_text(self.share),
            "for": None if self.duration_s is None else _time_text(self.duration_s),
        }
        given = "".join(f",{name}={value}" for name, value in how.items() if value is not None)
        return f"{self.kind}{target}{when}{given}"


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
        if KINDS[kind].coordinator_too:
            return None
        others = (f"{name}:{_COORDINATOR}" for name, known in KINDS.items() if known.coordinator_too)
        raise _wrong(
            text, f"to the coordinator happens one of {_COORDINATOR}, {', '.join(others)}", _COORDINATOR
        )
    try:
        return parse_failure(f"{what}:{target}")
    except UsageError:
        raise _wrong(text, f"'{target}' is no {_FORMS[what]}, with numbers counted from 0", kind) from None


def _settings(text: str, when: str, kind: str) -> dict[str, str]:
    """Split `step=5,for=3s` into its settings, each given once."""
    settings: dict[str, str] = {}
    for part in when.split(",") if when else ():
        name, equals, value = part.partition("=")
        if not equals or not value:
            raise _wrong(text, f"'{part}' is no setting of the form name=value", kind)
        if name in settings:
            raise _wrong(text, f"'{name}' is given twice", kind)
        settings[name] = value
    return settings


def _check_settings(text: str, kind: str, given: set[str]) -> None:
    known = KINDS[kind]
    for name in sorted(given - set(known.takes)):
        if name == "for":
            raise _wrong(text, f"{kind} takes no for=TIME, it is for the rest of the job", kind)
        raise _wrong(text, f"'{name}' is no setting of {kind}", kind)
    for name in known.needs:
        if name not in given:
            raise _wrong(text, f"{kind} needs {name}=", kind)


def _trigger(text: str, kind: str, settings: dict[str, str], at_once: bool) -> Trigger:
    unknown = sorted(settings.keys() - {"step", "t", "phase"})
    if unknown:
        names = ["step", "phase", "t", *KINDS[kind].takes]
        raise _wrong(text, f"'{unknown[0]}' is no setting of it, there are {', '.join(names)}", kind)
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
        return AtTime(_seconds(text, settings["t"]))
    if not re.fullmatch(r"[0-9]{1,12}", settings["step"]) or int(settings["step"]) == 0:
        raise _wrong(text, f"'{settings['step']}' is no step, a number counted from 1", kind)
    where = (*STEP_PHASES, RECOVERY)
    return AtStep(
        int(settings["step"]), "" if phase is None else _phase(text, kind, phase, where, "a phase of a step")
    )


def _server(text: str, kind: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise _wrong(text, f"'{value}' is no server, a number counted from 0", kind)
    return int(value)


def _phase(text: str, kind: str, phase: str, known: tuple[str, ...], what: str) -> str:
    if phase not in known:
        raise _wrong(text, f"'{phase}' cannot be; {what} is one of {', '.join(known)}", kind)
    return phase


def _seconds(text: str, value: str) -> float:
    time = _TIME.fullmatch(value)
    if time is None:
        raise _wrong(text, f"'{value}' is no time; a time has a unit, like 1.5s or 200ms", "cut")
    seconds = float(time["number"]) / (1000 if time["unit"] == "ms" else 1)
    if seconds > _MOST_S:
        raise _wrong(text, f"'{value}' is too long, a time is at most {_MOST_S}s", "cut")
    return seconds


def _period_s(text: str, value: str) -> float:
    seconds = _seconds(text, value)
    if seconds < 0.02:
        raise _wrong(text, f"a flap every {value} is too fast, give at least 20ms", "flap")
    return seconds


def _rate_bit(text: str, value: str) -> int:
    found = _RATE.fullmatch(value)
    rate_bit = round(Fraction(found["number"]) * _BITS[found["unit"]]) if found else 0
    if not _LEAST_BIT <= rate_bit <= _MOST_BIT:
        raise _wrong(text, f"'{value}' is no rate, from 8kbit to 10gbit", "slow")
    return rate_bit


def _share(text: str, value: str) -> float:
    found = _SHARE.fullmatch(value)
    if found is None or not 0 < float(found["number"]) <= 100:
        _no_share(text, value)
    return float(found["number"]) / 100


def _no_share(text: str, value: str) -> NoReturn:
    raise _wrong(text, f"'{value}' is no share, a number with % from 0.0001% to 100%", "loss")


def share_text(share: float) -> str:
    """Write the fraction of packets that a cable loses as the notation has it: `5%`."""
    return f"{share * 100:.4f}".rstrip("0").rstrip(".") + "%"


def _time_text(seconds: float) -> str:
    return f"{seconds!r}s".replace(".0s", "s")


def _rate_text(rate_bit: int) -> str:
    for unit in ("g", "m", "k"):
        if rate_bit % _BITS[unit] == 0:
            return f"{rate_bit // _BITS[unit]}{unit}bit"
    return f"{rate_bit}bit"
