"""The saved state of emulated fabrics: a JSON file for each, in a folder that one command at a time locks."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bml.fabric.condition import BURST_NBYTES, Condition, Damage
from bml.io.files import write_whole
from bml.topology.errors import FabricError, UsageError

FOLDER = Path("/run/bml")
LOCK_S = 30.0
"""The seconds that a command waits for another one; making the largest fabric takes a second."""

_LOOK_S = 0.02  # how often the lock is tried


@dataclass(frozen=True)
class State:
    """The state of one fabric. `complete`: it was built to the end; else its building was interrupted.

    `maker` is the process for which it was made and with which it ends, and `maker_began` its start time; 0:
    the fabric stays until it is taken down. `alone`: it is only for a job of that process.
    """

    fabric: str
    condition: Condition
    complete: bool
    maker: int = 0
    maker_began: int = 0
    alone: bool = False

    @classmethod
    def of(cls, fabric: str, condition: Condition, complete: bool, maker: int, alone: bool) -> State:
        """The state of a fabric that is made now, for the process `maker`."""
        return cls(fabric, condition, complete, maker, _began(maker) if maker else 0, alone)

    @property
    def orphaned(self) -> bool:
        """Whether its maker has ended without taking it down."""
        return self.maker != 0 and _began(self.maker) != max(self.maker_began, 1)


def load(name: str) -> State | None:
    """The saved state, None if there is none; a file that cannot be read counts as an incomplete fabric."""
    try:
        content = json.loads((FOLDER / f"{name}.json").read_text())
        condition = Condition(
            int(content["rate_bit"]),
            int(content["one_switch_bit"]),
            frozenset(Damage.parse(text) for text in content["damages"]),
            frozenset((Damage.parse(text), str(job)) for text, job in content.get("holds", [])),
            int(content.get("burst_nbytes", BURST_NBYTES)),
        )
        maker, began = int(content.get("maker", 0)), int(content.get("maker_began", 0))
        complete, alone = bool(content["complete"]), bool(content.get("alone", maker))
        return State(str(content["fabric"]), condition, complete, maker, began, alone)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError):
        return State("", Condition(0, 0), complete=False)


def save(name: str, state: State) -> None:
    """Save the state for later commands. Raises FabricError if the file cannot be written."""
    content = {
        "fabric": state.fabric,
        "rate_bit": state.condition.rate_bit,
        "one_switch_bit": state.condition.one_switch_bit,
        "damages": sorted(str(damage) for damage in state.condition.damages),
        "burst_nbytes": state.condition.burst_nbytes,
        "holds": sorted((str(damage), job) for damage, job in state.condition.holds),
        "complete": state.complete,
        "maker": state.maker,
        "maker_began": state.maker_began,
        "alone": state.alone,
    }
    path = FOLDER / f"{name}.json"
    try:
        write_whole(path, json.dumps(content).encode())
    except OSError as error:
        raise FabricError(f"{path}, which says what is up, cannot be written: {error.strerror}") from None


def forget(name: str) -> None:
    """Remove the state: no fabric is up under this name any more."""
    (FOLDER / f"{name}.json").unlink(missing_ok=True)


@contextmanager
def locked(within_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock for changes of emulated fabrics; other commands wait.

    Raises FabricError without root, and if another command holds the lock for longer than `within_s`.
    """
    if os.geteuid() != 0:
        raise FabricError("an emulated fabric is made of network namespaces, that needs root: use sudo")
    try:
        FOLDER.mkdir(mode=0o755, exist_ok=True)
        descriptor = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise FabricError(f"emulated fabrics are kept in {FOLDER}: {error.strerror}") from None
    try:
        _lock(descriptor, time.monotonic() + within_s, within_s)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, until: float, within_s: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise FabricError(
                    f"another command has been changing emulated fabrics for more than {within_s:g} s: see "
                    f"which with fuser -v {FOLDER}, and end it if it hangs"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return


def _began(process: int) -> int:
    """The start time of a process, in ticks since the machine started; 0 if there is no such process."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
