"""The file of the cost model's constants, in JSON: calibration writes it, jobs and `bml plan` read it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path

from bml.io.files import write_whole
from bml.schedule.select.model import DEFAULTS, Constants
from bml.topology import UsageError

_ROUND_S = 150e-6
"""Processor seconds of a server for a round of a small step, found by experiment."""


def default_path() -> Path:
    """Return `$BML_CONSTANTS`, else `bml/constants.json` in the user's configuration folder.

    Raises:
        UsageError: the user has no home folder, and no place was named.
    """
    named = os.environ.get("BML_CONSTANTS")
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(named) if named else Path(folder).expanduser() / "bml" / "constants.json"
    except RuntimeError:
        raise UsageError("this user has no home folder for constants: name a file in BML_CONSTANTS") from None


def load_constants(path: Path | None = None) -> tuple[Constants, str]:
    """Return the constants and their source; the defaults if the usual file does not exist.

    Raises:
        UsageError: a file that was named does not exist, or a file does not hold positive numbers.
    """
    source = path or _usual()
    if source is None:
        return DEFAULTS, "default constants, not measured here"
    try:
        read = json.loads(source.read_text())
        values = {field.name: float(read[field.name]) for field in fields(Constants)}
        if min(values.values()) < 0:
            raise ValueError("a constant is negative")
    except (OSError, ValueError, KeyError, TypeError) as error:
        names = ", ".join(field.name for field in fields(Constants))
        raise UsageError(
            f"{source} holds no constants ({error!r}): it must be a JSON object of {names}, in seconds"
        ) from None
    return Constants(**values), f"constants of {source}"


def _usual() -> Path | None:
    """Return the usual file, if this user can have one: the home folder may be missing, or another user's."""
    try:
        path = default_path()
        return path if path.exists() else None
    except (UsageError, OSError):
        return None


def store_constants(constants: Constants, path: Path | None = None) -> Path:
    """Write the constants, to the usual file if no other is named; return the file.

    Raises:
        UsageError: they cannot be written there.
    """
    target = path or default_path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, (json.dumps(asdict(constants), indent=2) + "\n").encode())
    except OSError as error:
        raise UsageError(f"the constants cannot be written to {target}: {error.strerror}") from None
    return target


def constants_of_emulated(known: Constants, goodput: float, n_servers: int) -> Constants:
    """Return the constants of an emulated fabric: NICs of `goodput` bytes/s, and servers that share cores."""
    return replace(known, alpha_s=_start_up_s(known, n_servers), beta_s=1 / goodput)


def constants_of_one_host(known: Constants, n_servers: int) -> Constants:
    """Return the constants of servers that share the cores of one host: bytes cost processor time, too."""
    crowd = _crowd(n_servers)
    return Constants(
        alpha_s=_start_up_s(known, n_servers),
        beta_s=crowd * known.beta_s,
        gamma_s=crowd * known.gamma_s,
        delta_s=crowd * known.delta_s,
        epsilon_s=crowd * known.epsilon_s,
    )


def _start_up_s(known: Constants, n_servers: int) -> float:
    return max(known.alpha_s, _crowd(n_servers) * _ROUND_S)


def _crowd(n_servers: int) -> float:
    """Servers that share a core."""
    return max(1.0, n_servers / (os.cpu_count() or 1))
