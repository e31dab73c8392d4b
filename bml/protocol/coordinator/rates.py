"""The rates of the next view: what servers measured is judged round by round, and acted on with patience.

A NIC is planned slower when ROUNDS rounds in a row found it so and at least LEAST_GAIN of all time would be
saved, which is never more than the time in which it was busy. It is planned faster when it was found faster
for as long as a part that failed so often must be heard before it is used again (bml.faults.healing). One of
which nothing is known for four times as long, as no tree uses it, is tried again. Each time that a NIC is
found slow anew doubles that wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from bml.faults.healing import stable_s
from bml.faults.slowness import Judgement, Moved, Path, Throughput, halvings_of, in_words, slowed
from bml.protocol.timeouts import Timeouts
from bml.protocol.wire.messages import Measured, Rate, View
from bml.schedule.ir.nics import cut_bound, number_nics
from bml.topology import Fabric, Link

ROUNDS = 3
"""Where processes wait for a core, a healthy NIC looks slow in one round, and now and then in two."""

LEAST_GAIN = Fraction(15, 100)
"""Of all time, also that in which the NICs rest: trees that gain less are not worth a view change."""

FASTER = 1.5
"""A NIC is found faster when it moves so many times what it is planned with."""

_UNKNOWN = 4.0


class Rates:
    """The rates that servers measure on the whole `fabric`, and those that the next view is to have."""

    def __init__(self, fabric: Fabric, timeouts: Timeouts):
        self.act_at: float | None = None
        """When the round that has begun is to be judged, in seconds."""
        self._fabric = fabric
        self._timeouts = timeouts
        self._throughput = Throughput()
        self._judged_at: float | None = None
        self._round: dict[Path, Moved] = {}
        self._wanted: dict[Link, int] | None = None
        self._planned: dict[Link, int] = {}
        self._slower_for: dict[Link, int] = {}
        self._anyway_for: dict[Link, int] = {}
        self._faster_since: dict[Link, float] = {}
        self._unknown_since: dict[Link, float] = {}

    def measured(self, message: Measured, now: float) -> None:
        """A server has measured; others are about to say what they have."""
        for peer, level, nbytes, busy_us in message.moved:
            path = message.server, peer, level
            before = self._round.get(path, Moved(0.0, 0.0))
            self._round[path] = Moved(before.nbytes + nbytes, before.busy_s + busy_us / 1e6)
        if self.act_at is None:
            self.act_at = now + self._timeouts.measure_s / 2

    def installed(self, view: View) -> None:
        """This view is in force: from now on other bytes go other ways.

        A NIC that it plans as before goes on to prove itself, lest views that follow one another closely keep
        it out for ever.
        """
        self.act_at = self._judged_at = self._wanted = None
        self._round.clear()
        self._throughput.clear()
        self._slower_for.clear()
        self._anyway_for.clear()
        before, self._planned = self._planned, halvings(view)
        for since in (self._faster_since, self._unknown_since):
            for nic in [nic for nic in since if self._planned.get(nic) != before.get(nic)]:
                del since[nic]

    def judge(self, view: View, now: float) -> bool:
        """Whether the next view is to have other rates than this one; False before `act_at` has come."""
        if self.act_at is None or now < self.act_at:
            return False
        self.act_at = None
        round_s = self._timeouts.measure_s
        over_s = round_s if self._judged_at is None else max(round_s, now - self._judged_at)
        self._judged_at = now
        self._throughput.add(self._round, over_s)
        self._round = {}
        alive = self._fabric.without(*view.failures)
        planned = halvings(view)
        judged = self._throughput.judge(alive, planned)
        if judged is None:
            self._slower_for.clear()
            self._anyway_for.clear()
            return False
        wanted = {**planned, **self._faster(judged, view, now)}
        wanted |= self._found_slower(judged, alive, wanted)
        self._wanted = None if wanted == planned else wanted
        return self._wanted is not None

    def following(self, view: View | None, alive: Fabric) -> tuple[Rate, ...]:
        """The rates of the view that follows `view`, of those NICs that are `alive` then."""
        if view is None:
            return ()
        times = {(rate.server, rate.level): rate.times for rate in view.rates}
        before = halvings(view)
        wanted = before if self._wanted is None else self._wanted
        for nic, count in wanted.items():
            times[nic] = times.get(nic, 0) + (count > before.get(nic, 0))
        return tuple(
            Rate(*nic, wanted.get(nic, 0), count)
            for nic, count in sorted(times.items())
            if alive.nic_alive(*nic)
        )

    def news(self, view: View | None) -> str:
        """The change of rates in words; empty if there is none."""
        if view is None or self._wanted is None:
            return ""
        before = halvings(view)
        said = in_words(self._fabric.without(*view.failures), before, self._wanted)
        slower = any(count > before.get(nic, 0) for nic, count in self._wanted.items())
        return f"{said}, trees avoid it" if slower else said

    def _found_slower(self, judged: Judgement, alive: Fabric, planned: Mapping[Link, int]) -> dict[Link, int]:
        """The NICs that were found slower in ROUNDS rounds in a row, if to avoid them gains enough.

        At least one of them must have delayed others in all these rounds. Of one that has not, half its rate
        is too little to tell: where others are slow it rests between their bytes, and may be well.
        """
        slower, anyway = judged.slower(), judged.slower_anyway()
        self._slower_for = {nic: self._slower_for.get(nic, 0) + 1 for nic in slower}
        self._anyway_for = {nic: self._anyway_for.get(nic, 0) + 1 for nic in anyway}
        if max(self._slower_for.values(), default=0) < ROUNDS:
            return {}
        delaying = {nic: anyway[nic] for nic, rounds in self._slower_for.items() if rounds >= ROUNDS}
        idle = {nic: count for nic, count in anyway.items() if count > planned.get(nic, 0) + 1}
        found = {nic: count for nic, count in idle.items() if self._anyway_for[nic] >= ROUNDS} | delaying
        busy = max(judged.busy(nic) for nic in delaying)
        return found if busy * gain(alive, planned, delaying, {**planned, **found}) >= LEAST_GAIN else {}

    def _faster(self, judged: Judgement, view: View, now: float) -> dict[Link, int]:
        """The slow NICs that have been faster than planned for long enough, or unknown."""
        found: dict[Link, int] = {}
        for rate in view.rates:
            nic = rate.server, rate.level
            if not rate.halvings:
                continue
            wait_s = stable_s(rate.times, self._timeouts.detect_s)
            share = judged.share(nic)
            if share is None:  # that takes nothing back of what was known before
                if now - self._unknown_since.setdefault(nic, now) >= _UNKNOWN * wait_s:
                    found[nic] = 0
                continue
            self._unknown_since.pop(nic, None)
            count = halvings_of(share)
            if count >= rate.halvings or share < FASTER * 2.0**-rate.halvings:
                self._faster_since.pop(nic, None)
            elif now - self._faster_since.setdefault(nic, now) >= wait_s:
                found[nic] = count
        return found


def halvings(view: View) -> dict[Link, int]:
    """NIC -> by how many halvings of its nominal rate this view plans with it; those that it plans slow."""
    return {(rate.server, rate.level): rate.halvings for rate in view.rates if rate.halvings}


def gain(
    alive: Fabric, planned: Mapping[Link, int], delaying: Mapping[Link, int], found: Mapping[Link, int]
) -> Fraction:
    """The part of a step's time that trees for the rates `found` save, over those for the rates `planned`.

    By bounds that packed trees come close to: trees load every NIC by its planned rate, so all wait for the
    slowest of the NICs that are `delaying` them now. What NICs that delay nobody have to carry takes no time.
    """
    late = max(Fraction(2) ** (count - planned.get(nic, 0)) for nic, count in delaying.items())
    now_t = _bound(slowed(alive, planned)) * late
    return 1 - _bound(slowed(alive, found)) / now_t if now_t else Fraction(0)


def _bound(fabric: Fabric) -> Fraction:
    return cut_bound(number_nics(fabric))
