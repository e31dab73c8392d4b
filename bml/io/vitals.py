"""What the kernel says of a machine's health: memory, swap, corrected errors, temperatures. Linux only.

All of it is optional: what a machine does not tell is None. The files are small; to read them all takes a
fraction of a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from bml.predict.trouble import HostSample

_KIB = 1 << 10
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_inactive_file", "total_active_file")
"""What the kernel takes back when a group needs memory, as `memory.stat` of cgroups v2, and v1, calls it."""
_MILLI = 1000.0


class HostVitals:
    """Reads below `root`, which is "/" but in tests."""

    def __init__(self, root: Path = Path("/")):
        self._root = root
        self._errors = tuple(root.glob("sys/devices/system/edac/mc/mc*/ce_count"))
        self._sensors = tuple(_sensors(root))
        self._cgroup = _cgroup(root)
        self._before: tuple[float, int | None, int | None] | None = None

    def sample(self, now: float) -> HostSample:
        """What the machine says now; shares and rates are those since the last sample."""
        stalled_us, swapped = self._stalled_us(), self._field("proc/vmstat", "pswpout")
        before, self._before = self._before, (now, stalled_us, swapped)
        errors = [count for file in self._errors if (count := _number(file)) is not None]
        headroom = [_below(*sensor) for sensor in self._sensors]
        known_headroom = [each for each in headroom if each is not None]
        share = rate = None
        if before is not None and now > before[0]:
            past_s = now - before[0]
            if stalled_us is not None and before[1] is not None:
                share = (stalled_us - before[1]) / 1e6 / past_s
            if swapped is not None and before[2] is not None:
                rate = (swapped - before[2]) / past_s
        return HostSample(
            stalled_share=share,
            swapped_pages_s=rate,
            free_nbytes=self._free_nbytes(),
            corrected_errors=sum(errors) if errors else None,
            headroom_c=min(known_headroom, default=None),
        )

    def _stalled_us(self) -> int | None:
        """Microseconds in which some process waited for memory: of this process's group, else the machine."""
        for file in (self._cgroup / "memory.pressure", self._root / "proc/pressure/memory"):
            with suppress(OSError, ValueError, IndexError):
                some = file.read_text().splitlines()[0]
                return int(some.rpartition("total=")[2])
        return None

    def _free_nbytes(self) -> float | None:
        """Bytes that processes may still take: of the machine, or what the limit of the group leaves.

        The use of a group includes its page cache, which grows with every file that is read. That is
        given back as soon as somebody needs memory, so it is free, as it is in MemAvailable.
        """
        free_kib = self._field("proc/meminfo", "MemAvailable:")
        most, taken = _number(self._cgroup / "memory.max"), _number(self._cgroup / "memory.current")
        names: tuple[str, ...] = _RECLAIMABLE
        if most is None or taken is None:
            most = _number(self._cgroup / "memory.limit_in_bytes")
            taken, names = _number(self._cgroup / "memory.usage_in_bytes"), _RECLAIMABLE_V1
        left = [] if free_kib is None else [float(free_kib * _KIB)]
        if most is not None and taken is not None:
            cached = sum(_field(self._cgroup / "memory.stat", name) or 0 for name in names)
            left.append(float(most - max(0, taken - cached)))
        return min(left, default=None)

    def _field(self, file: str, name: str) -> int | None:
        return _field(self._root / file, name)


def _cgroup(root: Path) -> Path:
    """The folder of this process's group of memory; one that does not exist if there is none."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if (
                number == "0"
                and (folder := root / "sys/fs/cgroup" / path.lstrip("/")).joinpath("memory.max").exists()
            ):
                return folder
            if controllers == "memory":
                return root / "sys/fs/cgroup/memory" / path.lstrip("/")
    return root / "nowhere"


def _sensors(root: Path) -> Iterator[tuple[Path, float]]:
    """The files of the sensors that say at which temperature the machine stops, and that temperature."""
    for file in sorted(root.glob("sys/class/hwmon/hwmon*/temp*_crit")):
        if (critical := _number(file)) is not None and critical > 0:
            yield file.with_name(file.name.replace("_crit", "_input")), critical / _MILLI


def _below(file: Path, critical: float) -> float | None:
    value = _number(file)
    return None if value is None else critical - value / _MILLI


def _field(file: Path, name: str) -> int | None:
    """The number after a name at the beginning of a line."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return None


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
