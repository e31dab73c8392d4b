"""The whole state of a server's core as bytes, and a core that is set to such a state.

What follows from the view in force and the settings (programs, engines' layouts, the phases of the barrier)
is not in it, and is made again. Every other attribute is, so one that is added later is in it unasked; if its
value cannot be, taking the state raises TypeError.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from bml.faults.detector import Detector
from bml.faults.healing import Recovery
from bml.faults.stalls import Stalls
from bml.faults.throughput import Meter
from bml.protocol.record.values import RecordingError, plain, value_of
from bml.protocol.server.calls import Calls
from bml.protocol.server.control_frames import ControlFrames
from bml.protocol.server.core import ServerCore
from bml.protocol.server.donor import Donor
from bml.protocol.server.history import ViewHistory, ViewRecord
from bml.protocol.server.learner import Learner
from bml.protocol.server.lease import CoordinatorLease
from bml.protocol.server.member import Member
from bml.protocol.server.result_fetch import ResultFetch
from bml.protocol.server.running_step import RunningStep
from bml.protocol.server.steps import StepMachine
from bml.protocol.server.watch import Watch
from bml.protocol.step.barrier import Barrier
from bml.protocol.step.dataflow import Stamp
from bml.protocol.step.exchange import AnyEngine, Engines
from bml.protocol.timeouts import Timeouts
from bml.topology import Fabric

State = dict[str, dict[str, Any]]
"""Part of a core -> its attributes, as plain data."""

_PARTS = (
    Calls, CoordinatorLease, Detector, Donor, Learner, Member, Meter, ControlFrames, Recovery, ResultFetch,
    Stalls, StepMachine, ViewHistory, Watch,
)  # fmt: skip
_OUTSIDE = (*_PARTS, Engines, Fabric, Timeouts)
#: Made again from the view and the settings, or of the recorder; `current` is taken apart.
_DERIVED = {"_engines", "_phases", "_learner", "_tape", "_seen", "current"}
_DERIVED_OF_ENGINES = {
    "server", "stamp", "n_elements", "expected", "scratch_elements", "place", "_layout", "_units", "_starts",
    "_program", "_rounds",
}  # fmt: skip

_BYTES = "_bytes_of_recorder"
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, dict[str, Any]]).decode


def state_of(core: ServerCore) -> bytes:
    """Return the state of a core; equal states are equal bytes."""
    state = {name: _attributes(part, _DERIVED) for name, part in _parts(core)}
    step = core._steps.current
    state["running"] = {} if step is None else _running(step)
    return _encode(state)


def digest(state: bytes) -> str:
    """A short hash of a state."""
    return blake2b(state, digest_size=8).hexdigest()


def read(state: bytes) -> State:
    """Return the attributes of all parts. Raises RecordingError."""
    try:
        return _decode(state)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordingError(f"damaged: no state of a server's core ({error})") from None


def set_state(core: ServerCore, state: bytes) -> None:
    """Set a new core, made with the same settings, to this state. Raises RecordingError."""
    found = read(state)
    parts = dict(_parts(core))
    if {*parts, "running"} != found.keys():
        raise RecordingError(f"damaged: a core has the parts {[*parts]}, not {[*found]}")
    _fill(parts["member"], found["member"])
    if core.view is not None:
        core.plan(core.view)
    for name, part in parts.items():
        _fill(part, found[name])
    core._steps.current = _step_of(core._steps, found["running"]) if found["running"] else None


def difference(one: bytes, other: bytes) -> str:
    """Where two states differ, in words; "" if they are equal."""
    if one == other:
        return ""
    ours, theirs = read(one), read(other)
    for part in sorted({*ours, *theirs}):
        mine, its = ours.get(part, {}), theirs.get(part, {})
        for name in sorted({*mine, *its}):
            if mine.get(name) != its.get(name):
                return f"{part}.{name} is {mine.get(name)!r:.120}, recorded {its.get(name)!r:.120}"
    return "their bytes"


def _parts(core: ServerCore) -> Iterator[tuple[str, Any]]:
    watch, steps = core._watch, core._steps
    yield "member", core._member
    yield "core", core
    if core._learner is not None:
        yield "learner", core._learner
    yield "donor", core._donor
    yield "watch", watch
    yield "detector", watch._detector
    yield "stalls", watch._stalls
    yield "recovery", watch._recovery
    yield "meter", watch._meter
    yield "calls", core._calls
    yield "history", core._view_history
    yield "steps", steps
    yield "fetch", steps._fetch
    yield "lease", core._lease


def _attributes(part: Any, derived: set[str]) -> dict[str, Any]:
    return {
        name: _records(value) if isinstance(part, ViewHistory) and name == "records" else plain(value)
        for name, value in sorted(vars(part).items())
        if name not in derived and not isinstance(value, _OUTSIDE) and not callable(value)
    }


def _records(records: list[ViewRecord]) -> list[Any]:
    """Up to a thousand views, each with all servers: too long to be made anew with every state."""
    return ["l", *map(_record, records)]


def _record(record: ViewRecord) -> msgspec.Raw:
    """The bytes of a record, which nobody changes, so they stay with it."""
    known = vars(record)
    if _BYTES not in known:
        known[_BYTES] = msgspec.Raw(_encode(plain(record)))
    found: msgspec.Raw = known[_BYTES]
    return found


def _fill(part: Any, attributes: dict[str, Any]) -> None:
    wanted = _attributes(part, _DERIVED).keys()
    if wanted != attributes.keys():
        raise RecordingError(f"damaged: {type(part).__name__} has {sorted(wanted)}, not {sorted(attributes)}")
    for name, data in attributes.items():
        setattr(part, name, value_of(data))


# --- the step that runs --------------------------------------------------------------------------


def _running(step: RunningStep) -> dict[str, Any]:
    return {
        "submit": plain(step.submit),
        "contributors": plain(step.contributors),
        "stamp": plain(step.engine.stamp),
        "n_elements": step.engine.n_elements,
        "at": plain(step.stamp),
        "follows": step.follows,
        "left": plain(step.left),
        "entered": step.entered,
        "engine": plain(_engine(step.engine)),
        "barrier": plain([step.barrier._next, step.barrier._seen, step.barrier._entered]),
    }


def _engine(engine: AnyEngine) -> dict[str, Any]:
    return {name: value for name, value in sorted(vars(engine).items()) if name not in _DERIVED_OF_ENGINES}


def _step_of(steps: StepMachine, state: dict[str, Any]) -> RunningStep:
    if steps._engines is None:
        raise RecordingError("damaged: a step runs and there is no view")
    try:
        data = {name: value_of(each) for name, each in state.items()}
        engine = steps._engines.engine(Stamp(*data["stamp"]), data["n_elements"])
        vars(engine).update(data["engine"])
        barrier = Barrier(steps._phases)
        barrier._next, barrier._seen, barrier._entered = data["barrier"]
        return RunningStep(
            data["submit"], data["contributors"], engine, barrier, data["at"], data["follows"], data["left"],
            data["entered"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"damaged: no step of a server's core ({error!r})") from None
