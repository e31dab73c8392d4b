"""The settings of links that all transports share, and how settings are read from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bml.protocol.wire.frame import MAX_NBYTES
from bml.topology.errors import UsageError
from bml.transport.handshake import traffic_class as classes

TRAFFIC_CLASS_SETTING = "BML_TRAFFIC_CLASS"


@dataclass(frozen=True)
class LinkSettings:
    """Settings of every link of a server. Raises UsageError for a traffic class that is no byte."""

    connect_s: float = 5.0
    """A link that is wanted but not up after so many seconds is lost."""
    nic_rate: float | None = None
    """The rate of every NIC in bytes per second, where it is known."""
    max_nbytes: int = MAX_NBYTES
    """The longest payload that is accepted, in bytes."""
    traffic_class: int = 0
    """The byte that marks all packets for the switches: a DSCP times 4."""

    def __post_init__(self) -> None:
        classes.traffic_class_of(self.traffic_class)


def traffic_class_of(environ: Mapping[str, str]) -> int:
    """The traffic class that the environment asks for, else 0. Raises UsageError that names the variable."""
    try:
        return classes.traffic_class_of(environ.get(TRAFFIC_CLASS_SETTING) or classes.NORMAL)
    except UsageError as error:
        raise UsageError(f"{TRAFFIC_CLASS_SETTING}: {error}") from None


def number_of(environ: Mapping[str, str], name: str, default: int) -> int:
    """The whole number in a variable. Raises UsageError, which names the variable, for other texts."""
    text = environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise UsageError(f"{name} is {text!r}: give a whole number") from None


def check_range(name: str, value: int, low: int, high: int) -> int:
    """Return `value`. Raises UsageError, which names the variable, unless low <= value <= high."""
    if not low <= value <= high:
        raise UsageError(f"{name} is {value}: give {low} to {high}")
    return value
