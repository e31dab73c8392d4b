"""A fault plan says what is to break and when, as text that can be repeated; each server reads its part.

One fault is written as in bml.faults.notation: `kill:4@step=20`, `cut:4/0@t=1.5s`, `switch:0/2@step=9`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import numpy as np

from bml.faults.kinds import KINDS
from bml.faults.notation import (
    RECOVERY,
    STEP_PHASES,
    AtOnce,
    AtPhase,
    AtStep,
    AtTime,
    Fault,
    Trigger,
)
from bml.topology import Fabric, Failure, LinkFailure, ServerFailure, SwitchFailure, UsageError

MIDDLE = 0.3
"""Fraction of a server's slices of a step after which the step counts as being in its middle."""

DRAWABLE = tuple(name for name, kind in KINDS.items() if kind.drawable)
"""Kinds that can be drawn: a job can survive them, on any fabric, without further settings."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The step and phase of a server. `phase` is one of STEP_PHASES or JOB_PHASES, "" if it is not known yet.

    `progress` is the fraction of its slices of `step` that were handled (0..1), `now_s` the seconds since
    the job's first view, None before.
    """

    step: int
    progress: float = 0.0
    phase: str = ""
    now_s: float | None = None


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
        parts = [texts] if isinstance(texts, str) else list(texts)
        for part in parts:
            if not isinstance(part, str):
                raise UsageError(f"{part!r:.80} is not the text of a fault, such as 'kill:4@step=20'")
        return cls(tuple(Fault.parse(word) for part in parts for word in part.split()))

    @classmethod
    def load(cls, content: str) -> "FaultPlan":
        """Read the content of a YAML file: a list of faults, or a mapping with that list under `faults`.

        Raises UsageError when the content is no YAML, has another shape, or an entry is no fault.
        """
        import yaml  # here, as no server reads files

        try:
            document = yaml.safe_load(content)
        except (yaml.YAMLError, RecursionError) as error:
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
        freeze lasts for the rest of the job. Raises UsageError for unknown kinds, for numbers that are not
        whole, and when `count` faults cannot be placed so.
        """
        for name, number in (("steps", steps), ("count", count)):
            if type(number) is not int:
                raise UsageError(f"{name} is {number!r:.80}: give a whole number")
        if isinstance(kinds, str):
            raise UsageError(f"kinds is {kinds!r:.80}: give a list of kinds, such as ['kill', 'cut']")
        if seed < 0:
            raise UsageError(f"the seed of a fault plan is {seed}: give a number from 0")
        chosen = list(kinds)
        for kind in chosen:
            if kind not in DRAWABLE:
                raise UsageError(f"cannot draw '{kind}' faults; available: {', '.join(DRAWABLE)}")
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
            try:
                if fault.target is not None:
                    fabric.without(fault.target)
            except UsageError as error:
                raise UsageError(f"fault '{fault}': {error}") from error
            if wrong := KINDS[fault.kind].check(fault.target, fault.settings, fabric):
                raise UsageError(f"fault '{fault}': {wrong}")

    def for_server(self, server: int, fabric: Fabric) -> tuple[Fault, ...]:
        """The faults that strike `server`: its own death and freeze, and the silence of its NICs.

        For a dead switch, each of its servers silences its own NIC on that level (`Fault.level`); each end of
        a connection makes it stand still; each server at a slow cable sends slowly.
        """
        return tuple(fault for fault in self.faults if acts(fault, server, fabric) and not fault.by_anybody)

    @property
    def for_anybody(self) -> tuple[Fault, ...]:
        """Faults that the lowest live server asks for: the coordinator's death, the start of a server."""
        return tuple(fault for fault in self.faults if fault.by_anybody)

    def __len__(self) -> int:
        """Number of faults."""
        return len(self.faults)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def __str__(self) -> str:
        return " ".join(str(fault) for fault in self.faults)


def due(faults: Iterable[Fault], moment: Moment) -> tuple[tuple[Firing, ...], tuple[Fault, ...]]:
    """Decide which faults strike now: (those, with the reason; those that are still to come).

    Pass the second part back in at the next call: so each fault strikes once. A fault whose step or phase
    went by between two calls strikes late rather than never; one for a recovery waits for a recovery.
    """
    firings, pending = [], []
    for fault in faults:
        why = _why_now(fault.trigger, moment)
        if why is None:
            pending.append(fault)
        else:
            firings.append(Firing(fault, why))
    return tuple(firings), tuple(pending)


def _why_now(trigger: Trigger, moment: Moment) -> str | None:
    match trigger:
        case AtOnce():
            return "at once"
        case AtTime(t_s):
            late = moment.now_s is not None and moment.now_s >= t_s
            return f"{moment.now_s:.3f} s since the first view" if late else None
        case AtPhase(phase):
            return f"the job is in its phase {phase}" if moment.phase == phase else None
        case AtStep(step, phase):
            return _why_in_step(step, phase, moment)


def _why_in_step(step: int, phase: str, moment: Moment) -> str | None:
    if moment.now_s is None:
        return None
    if phase == RECOVERY:
        found = moment.phase == RECOVERY and moment.step >= step
        return f"step {moment.step} is being recovered" if found else None
    if moment.step > step:
        return f"step {step} has passed, this is step {moment.step}"
    if moment.step < step:
        return None
    if not phase:
        return f"{moment.progress:.0%} of step {step} was handled" if moment.progress >= MIDDLE else None
    reached = moment.phase in STEP_PHASES and STEP_PHASES.index(moment.phase) >= STEP_PHASES.index(phase)
    return f"step {step} is in its phase {moment.phase}" if reached else None


def touches(fault: Fault, server: int, fabric: Fabric) -> bool:
    """Whether the fault strikes this server or one of its NICs."""
    match fault.target:
        case ServerFailure(of) | LinkFailure(of, _):
            return server in (of, fault.peer)
        case SwitchFailure(level, group):
            return fabric.group(server, level) == group
        case None:
            return False


def acts(fault: Fault, server: int, fabric: Fabric) -> bool:
    """Whether this server may have to do something to apply the fault: it is struck, or at the other end."""
    if touches(fault, server, fabric):
        return True
    match fault.target:
        case LinkFailure(of, level):
            return KINDS[fault.kind].both_ends and server in fabric.neighbours(of, level)
        case _:
            return False


def _draw_part(
    rng: np.random.Generator, left: Fabric, kinds: list[str], whole: Fabric
) -> tuple[str, Failure | None]:
    """Draw a kind, then a part of it that the job can lose; another kind if it has none."""
    for at in rng.permutation(len(kinds)).tolist():
        target = KINDS[kinds[at]].target
        if not target:
            return kinds[at], None
        survivable = [part for part in _parts(left, target) if _survives(left.without(part), whole)]
        if survivable:
            return kinds[at], survivable[int(rng.integers(len(survivable)))]
    raise UsageError(
        f"no further {' or '.join(kinds)} can be drawn on {left}: "
        "the rest would fall apart; draw fewer faults"
    )


def _parts(left: Fabric, what: Literal["server", "link", "switch"]) -> list[Failure]:
    match what:
        case "server":
            return [ServerFailure(server) for server in left.servers]
        case "link":
            return [LinkFailure(server, level) for server, level in left.links]
        case "switch":
            return [SwitchFailure(level, group) for level, group in left.switches]
        case never:
            assert_never(never)


def _survives(left: Fabric, whole: Fabric) -> bool:
    return left.is_connected and 2 * len(left.servers) > len(whole.servers)
