"""What is known to be up: a JSON file per emulated fabric, in a folder that one command at a time locks."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bml.fabric.condition import Condition, Damage
from bml.topology.errors import FabricError, UsageError

FOLDER = Path("/run/bml")


@dataclass(frozen=True)
class State:
    """`complete`: it was built to the end; otherwise whoever built it was interrupted.

    `maker`: the process that it was made for and ends with; 0: it stays until it is taken down.
    """

    fabric: str
    condition: Condition
    complete: bool
    maker: int = 0

    @property
    def orphaned(self) -> bool:
        """Whether the process that it was made for has ended without taking it down."""
        return self.maker != 0 and not Path(f"/proc/{self.maker}").exists()


def load(name: str) -> State | None:
    """Return what was saved, None if nothing. A file that cannot be read counts as an unfinished fabric."""
    try:
        content = json.loads((FOLDER / f"{name}.json").read_text())
        condition = Condition(
            int(content["rate_bit"]),
            int(content["one_switch_bit"]),
            frozenset(Damage.parse(text) for text in content["damages"]),
        )
        return State(
            str(content["fabric"]), condition, bool(content["complete"]), int(content.get("maker", 0))
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, UsageError):
        return State("", Condition(0, 0), complete=False)


def save(name: str, state: State) -> None:
    """Keep it for later commands."""
    content = {
        "fabric": state.fabric,
        "rate_bit": state.condition.rate_bit,
        "one_switch_bit": state.condition.one_switch_bit,
        "damages": sorted(str(damage) for damage in state.condition.damages),
        "complete": state.complete,
        "maker": state.maker,
    }
    path = FOLDER / f"{name}.json"
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def forget(name: str) -> None:
    """Nothing is up under this name any more."""
    (FOLDER / f"{name}.json").unlink(missing_ok=True)


@contextmanager
def locked() -> Iterator[None]:
    """Hold the only right to change emulated fabrics; others wait. Raises FabricError without root."""
    if os.geteuid() != 0:
        raise FabricError("an emulated fabric is made of network namespaces, that needs root: use sudo")
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    descriptor = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
