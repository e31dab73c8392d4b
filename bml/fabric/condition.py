"""The condition of an emulated fabric, rates and damage, and the settings of each end of a cable. Pure.

A cable is cut by taking the switch's port down: the server's NIC stays up, keeps its address and its route,
and has no carrier. A black hole keeps the carrier and drops what either end sends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bml.fabric.layout import MANAGEMENT, ONE_SWITCH, Cable, End, Layout, parse_rate, rate_text
from bml.faults.settings import DIRECTIONS, share_text
from bml.topology.errors import UsageError

BURST_NBYTES = 75_000
"""What a NIC may send at once after a rest; see `short_burst`.

Below about 70 kB every segment of 64 kB is split in software, which ruins the throughput.
"""
_SHORT_S = 0.01
"""A process of an emulated server waits about so long for a busy processor."""
_QUEUE_S = 0.08  # see `queue_nbytes`
_SEGMENT_S = 1.3e-3  # see `segment_nbytes`
_LEAST_SEGMENT, _MOST_SEGMENT = 4 << 10, 64 << 10
_WITH_HEADERS = 1.1
_SETTINGS = {"rate_bit": ("slow",), "share": ("loss",), "direction": ("slow", "loss")}
"""Which kinds of damage have a setting."""
_DAMAGE = re.compile(
    r"(cut|blackhole|slow|switch|loss):([0-9]{1,9})/([0-9]{1,9})"
    r"(?:(?:,rate=([0-9.a-z]+)|,share=([0-9]{1,3}(?:\.[0-9]{1,4})?)%)(?:,direction=(out|in|both))?)?"
)


@dataclass(frozen=True, order=True)
class Damage:
    """A damage of a part. `kind` is `cut`, `blackhole`, `slow` or `loss` of a link, or a dead `switch`.

    `at` is (server, level) of the link, or (level, group) of the switch.

    `rate_bit` is the rate of a slow cable in bits per second, `share` the fraction (0..1) of packets that a
    lossy cable drops. Either strikes what the NIC sends (`direction` out), what it receives (in), or both.
    Raises UsageError for a share or a direction that cannot be, and for a setting that the kind has not.
    """

    kind: str
    at: tuple[int, int]
    rate_bit: int = 0
    share: float = 0.0
    direction: str = "both"

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise UsageError(f"{self.direction!r} is no direction, one of {', '.join(DIRECTIONS)}")
        for name, kinds in _SETTINGS.items():
            if self.kind not in kinds and getattr(self, name) != getattr(Damage, name):
                raise UsageError(f"'{self.kind}' has no {name}: {' and '.join(kinds)} alone")
        if self.kind == "loss" and not 0 < round(self.share, 6) <= 1:
            raise UsageError(f"a cable cannot lose {self.share:%} of its packets: give 0.0001% to 100%")

    @classmethod
    def parse(cls, text: str) -> Damage:
        """Read the text of a damage, such as `cut:4/0` or `slow:4/1,rate=10mbit`. Raises UsageError."""
        found = _DAMAGE.fullmatch(text.strip())
        if (
            found is None
            or (found[1] == "slow") != (found[4] is not None)
            or (found[1] == "loss") != (found[5] is not None)
        ):
            raise UsageError(
                f"'{text}' is no damage: write it like cut:4/0, slow:4/1,rate=10mbit, loss:4/1,share=5% "
                "or switch:0/2"
            )
        rate_bit = parse_rate(found[4]) if found[4] else 0
        at, share = (int(found[2]), int(found[3])), float(found[5] or 0) / 100
        return cls(found[1], at, rate_bit, share, found[6] or "both")

    def __str__(self) -> str:
        rate = f",rate={rate_text(self.rate_bit)}" if self.kind == "slow" else ""
        share = f",share={share_text(self.share)}" if self.kind == "loss" else ""
        one_way = "" if self.direction == "both" else f",direction={self.direction}"
        return f"{self.kind}:{self.at[0]}/{self.at[1]}{rate}{share}{one_way}"

    def cables(self, layout: Layout) -> tuple[Cable, ...]:
        """The cables that it affects. Raises UsageError if the fabric has no such part."""
        return layout.cables_of(self.at) if self.kind == "switch" else (layout.cable(self.at),)

    def replaces(self, other: Damage) -> bool:
        """Whether both damage the same part, so that `damaged` replaces the older one."""
        return self.at == other.at and (self.kind == "switch") == (other.kind == "switch")


@dataclass(frozen=True)
class Condition:
    """`rate_bit` of the fabric's cables and `one_switch_bit` of the one-switch network's, in bits per second.

    A part may have several of the `damages` at a time. `holds` are pairs (damage, job): a damage stays until
    each of these jobs has undone it. A damage that nobody holds was done by hand. `burst_nbytes` is what an
    end of a cable may send at once after a rest; a slow one has a `short_burst` at most.
    """

    rate_bit: int
    one_switch_bit: int
    damages: frozenset[Damage] = frozenset()
    holds: frozenset[tuple[Damage, str]] = frozenset()
    burst_nbytes: int = BURST_NBYTES

    @property
    def rates(self) -> tuple[int, int]:
        """(rate of the fabric, rate of the one-switch network), without damage."""
        return self.rate_bit, self.one_switch_bit

    def with_damage(self, damage: Damage, job: str) -> Condition:
        """The condition with a damage that this job does, beside those that its part has.

        A damage that was done by hand stays so: the job does not hold it.
        """
        if damage in self.damages and not self._holders(damage):
            return self
        return replace(self, damages=self.damages | {damage}, holds=self.holds | {(damage, job)})

    def without_damage(self, damage: Damage, job: str) -> Condition:
        """The condition in which this job does not hold the damage; without it, if no other job holds it.

        Other damages of its part stay.
        """
        if (damage, job) not in self.holds:
            return self
        left = self.damages if self._holders(damage) - {job} else self.damages - {damage}
        return replace(self, damages=left, holds=self.holds - {(damage, job)})

    def damaged(self, damage: Damage) -> Condition:
        """The condition with one more damage, by hand, which replaces those that its part had before."""
        cleared = self.healed(damage)
        return replace(cleared, damages=cleared.damages | {damage})

    def healed(self, part: Damage) -> Condition:
        """The condition without any damage of `part.at`, a link or, if the kind is `switch`, a switch."""
        damages = frozenset(other for other in self.damages if not part.replaces(other))
        return replace(self, damages=damages, holds=_of(self.holds, damages))

    def unharmed(self) -> Condition:
        """The condition without any damage."""
        return replace(self, damages=frozenset(), holds=frozenset())

    def _holders(self, damage: Damage) -> set[str]:
        return {job for held, job in self.holds if held == damage}


@dataclass(frozen=True)
class Setting:
    """The settings of one end of a cable. `rate_bit` None: unshaped; 0: it drops all that it sends.

    `lost_share` is the fraction (0..1) of arriving packets that is dropped. After a rest, `burst_nbytes` are
    sent at once.
    """

    up: bool
    rate_bit: int | None
    lost_share: float = 0.0
    burst_nbytes: int = BURST_NBYTES

    @property
    def queue_nbytes(self) -> int:
        """Bytes that may wait in the token bucket's queue: 80 ms of the rate, and the burst."""
        return int((self.rate_bit or 0) / 8 * _QUEUE_S) + self.burst_nbytes

    @property
    def segment_nbytes(self) -> int:
        """The most bytes of TCP that pass the queue as one packet: 1.3 ms of the rate.

        A real NIC splits them before they reach the wire. Here they stay whole, and an urgent packet waits
        until the one before it has passed. Smaller ones would cost more of the processor.
        """
        return min(max(int((self.rate_bit or 0) / 8 * _SEGMENT_S), _LEAST_SEGMENT), _MOST_SEGMENT)


def short_burst(rate_bit: int, before_bit: int = 0) -> int:
    """Return bytes that make up for waits of 10 ms, and for no more: what a rest gives away is small.

    They are two packets that pass a queue of this rate at least: less would split or delay them. And they are
    one, with its headers, that came into the queue while its rate was `before_bit`: if it were larger than
    the burst, it would stay there for ever, before all others.
    """
    packets_nbytes = 2 * Setting(True, rate_bit).segment_nbytes
    waiting_nbytes = int(_WITH_HEADERS * Setting(True, before_bit).segment_nbytes)
    return min(max(packets_nbytes, waiting_nbytes, int(rate_bit / 8 * _SHORT_S)), BURST_NBYTES)


def setting(cable: Cable, end: End, condition: Condition) -> Setting:
    """The settings of this end of the cable."""
    if cable.network == MANAGEMENT:
        return Setting(up=True, rate_bit=None)
    if cable.network == ONE_SWITCH:
        return Setting(True, condition.one_switch_bit, burst_nbytes=condition.burst_nbytes)
    here = [damage for damage in condition.damages if _touches(damage, cable)]
    down = any(
        # A dead switch takes its ports down; a cut takes down the end that is not the named NIC's.
        (damage.kind == "switch" and (end.bridge is not None or len(cable.links) == 2))
        or (damage.kind == "cut" and end != cable.end_of(damage.at[0]))
        for damage in here
    )
    silent = any(damage.kind == "blackhole" for damage in here)
    # A rate is shaped where the packets leave, a loss is made where they arrive.
    slow = (damage.rate_bit for damage in here if damage.kind == "slow" and _of_sent(damage, cable, end))
    lossy = (damage.share for damage in here if damage.kind == "loss" and _of_arriving(damage, cable, end))
    slowest, lost = min([condition.rate_bit, *slow]), max(lossy, default=0.0)
    burst_nbytes = condition.burst_nbytes
    if slowest < condition.rate_bit:
        # What a rest gives away must not make a slow NIC look faster than it is.
        burst_nbytes = min(burst_nbytes, short_burst(slowest, condition.rate_bit))
    return Setting(not down, 0 if silent else slowest, lost, burst_nbytes)


def _of(holds: frozenset[tuple[Damage, str]], damages: frozenset[Damage]) -> frozenset[tuple[Damage, str]]:
    """Those of `holds` that hold one of these damages."""
    return frozenset((damage, job) for damage, job in holds if damage in damages)


def _of_sent(damage: Damage, cable: Cable, end: End) -> bool:
    """Whether it strikes what this end sends: out of the named NIC, or into it from the other end."""
    return damage.direction != ("in" if end == cable.end_of(damage.at[0]) else "out")


def _of_arriving(damage: Damage, cable: Cable, end: End) -> bool:
    """Whether it strikes what arrives at this end."""
    return damage.direction != ("out" if end == cable.end_of(damage.at[0]) else "in")


def _touches(damage: Damage, cable: Cable) -> bool:
    return damage.at == cable.switch if damage.kind == "switch" else damage.at in cable.links
