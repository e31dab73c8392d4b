"""Which of several fabrics a training is best run on, for one price, and which assumption decides that.

Each fabric has NICs of the rate that the price of the first one buys, prices growing with the rate
(`bml.lab.flows.prices`). An iteration is simulated on the whole fabric, and without each single part
(`bml.lab.survey.survey`, parts that are alike once); servers that are cut off are lost, and a job without
more than half of its servers does nothing. Its time on average weighs these by the shares of time for which
parts are dead (`bml.lab.survey.reliability`), without the time in which two and more are. Then the
assumptions are changed, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from bml.lab.flows.prices import Prices
from bml.lab.flows.prices import parts_of as counted
from bml.lab.flows.training.job import train
from bml.lab.flows.training.layers import computed_s, scaled
from bml.lab.flows.training.training import Part, Training
from bml.lab.flows.training.wires import Network, Wires
from bml.lab.survey.cost import Cost
from bml.lab.survey.reliability import KINDS, expected, kind_of
from bml.lab.survey.survey import Survey, survey
from bml.topology import Fabric, FabricError, Failure, ServerFailure, UsageError

_OFTEN = 10
"""How many times as often parts fail where that is changed."""
CLEARLY = 0.01
"""Times that differ by less, as a share, are alike: schedules on damaged fabrics are rounded by as much."""
_MOST_SETS = 400
"""Of single parts that differ, on a fabric without symmetries so many are drawn."""
_wires_of = lru_cache(maxsize=256)(Wires)


@dataclass(frozen=True)
class Assumed:
    """What a choice rests on.

    Attributes:
        training: as of a job on the first fabric; its parts are not looked at.
        network: `rate` is that of a NIC of the first fabric.
        prices: for one rate.
        dead: kind of part -> share of time for which one is dead; 0 for kinds that never fail.
        computing: how many times as long as in the training's layers a server computes.
    """

    training: Training
    network: Network
    prices: Prices
    dead: Mapping[str, float]
    computing: float = 1.0


@dataclass(frozen=True)
class Offer:
    """A fabric for the price of the first one.

    Attributes:
        fabric: its name.
        rate: bytes per second of its NICs.
        healthy_s: seconds of an iteration; None if it cannot be simulated, and `why` says why.
        broken_s: kind -> seconds without the part of that kind that costs most; None where too few servers
            are left. Kinds of which it has no parts are missing.
        mean_s: seconds of an iteration on average, of time in which at most one part is dead; None if none
            is ever done.
        left_out: the share of the other time.
    """

    fabric: str
    rate: float
    healthy_s: float | None
    broken_s: Mapping[str, float | None]
    mean_s: float | None
    left_out: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Change:
    """Another assumption.

    Attributes:
        what, to: what is changed, and to what, in words.
        best: the best fabric then; "" if there is none.
        less: how much less time on average it takes than the one that was best before, as a share.
    """

    what: str
    to: str
    best: str
    less: float

    @property
    def decides(self) -> bool:
        """Whether the best fabric before is clearly not so now."""
        return self.less > CLEARLY


def offers(fabrics: Sequence[Fabric], assumed: Assumed) -> list[Offer]:
    """Return what the training takes on these healthy fabrics, each for the price of the first."""
    own = assumed.prices.of(counted(fabrics[0]))
    return [
        _offer(fabric, float(own / assumed.prices.of(counted(fabric))), fabrics[0].n_servers, assumed)
        for fabric in fabrics
    ]


def best(found: Iterable[Offer]) -> Offer | None:
    """Return the offer with the least time on average, the first of several; None if none has one."""
    return min((each for each in found if each.mean_s is not None), key=_mean_s, default=None)


def alike(found: Iterable[Offer], least: Offer) -> list[str]:
    """Return the fabrics whose time on average is that of the best one, or hardly more."""
    most_s = _mean_s(least) * (1 + CLEARLY)
    return [each.fabric for each in found if each is not least and each.mean_s and each.mean_s <= most_s]


def changes(fabrics: Sequence[Fabric], assumed: Assumed, before: Offer) -> Iterator[Change]:
    """Yield other assumptions, each alone, with the fabric that is best then; `before` was the best one."""
    for what, to, other in _others(assumed):
        found = offers(fabrics, other)
        now, same = best(found), next(each for each in found if each.fabric == before.fabric)
        less = 1 - _mean_s(now) / _mean_s(same) if now and same.mean_s is not None else float(now is not None)
        yield Change(what, to, now.fabric if now else "", less)


def _others(assumed: Assumed) -> Iterator[tuple[str, str, Assumed]]:
    network, prices = assumed.network, assumed.prices
    for factor in (0.4, 2.5):
        rate = network.rate * factor
        yield "the rate of NICs", f"{factor:g} times", replace(assumed, network=replace(network, rate=rate))
    for factor in (0.5, 2.0):
        to = f"{factor:g} times"
        yield "the time of computation", to, replace(assumed, computing=assumed.computing * factor)
        port = prices.port * Fraction(factor)
        yield "the price of a switch's port", to, replace(assumed, prices=replace(prices, port=port))
    if any(assumed.dead.values()):
        yield "failures", "none", replace(assumed, dead=dict.fromkeys(assumed.dead, 0.0))
        often = {kind: _OFTEN * u / (1 + (_OFTEN - 1) * u) for kind, u in assumed.dead.items()}
        yield "failures", f"{_OFTEN} times as many", replace(assumed, dead=often)


def _offer(fabric: Fabric, bought: float, sharers: int, assumed: Assumed) -> Offer:
    """Price a fabric whose NICs have `bought` times the rate of those of the first one."""
    network = replace(assumed.network, rate=assumed.network.rate * bought)
    layers = tuple(scaled(assumed.training.layers, assumed.computing))
    # Costs are in units of the least that an iteration can take: the share of it is a bandwidth of at most 1.
    unit_s = computed_s(layers) * sharers / fabric.n_servers
    training = replace(assumed.training, layers=layers, slow=None, sharers=sharers)

    def costs(sets: Iterable[frozenset[Failure]]) -> Iterator[Cost]:
        for failures in sets:
            left, n, time = _together(fabric.without(*failures)), 0, None
            if 2 * len(left.servers) > fabric.n_servers:
                n = len(left.servers)
                (view,) = train(replace(training, parts=(Part(0, left),)), network, _wires_of)
                time = Fraction(view.iteration_s / unit_s)
            yield Cost(n, n, time, time)

    try:
        surveyed = survey(fabric, 1, _MOST_SETS, 0, costs)
    except (FabricError, UsageError) as error:
        return Offer(fabric.name, network.rate, None, {}, None, why=str(error))
    healthy, share = surveyed.rows[0].cases[0].cost.gst, expected(surveyed, assumed.dead, most=1.0)
    healthy_s = None if healthy is None else float(healthy) * unit_s
    mean_s = unit_s * share.known / share.low if share.low else None
    return Offer(fabric.name, network.rate, healthy_s, _worst(surveyed, unit_s), mean_s, share.unknown)


def _together(fabric: Fabric) -> Fabric:
    """Return the fabric without the servers that are cut off from its largest part."""
    parts = fabric.components()
    return fabric.without(*(ServerFailure(server) for part in parts[1:] for server in part))


def _worst(surveyed: Survey, unit_s: float) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for kind in KINDS:
        cases = [case for case in surveyed.rows[1].cases if kind_of(next(iter(case.failures))) == kind]
        times = [case.cost.gst for case in cases]
        if times:
            known = [float(time) for time in times if time is not None]
            found[kind] = max(known) * unit_s if len(known) == len(times) else None
    return found


def _mean_s(offer: Offer) -> float:
    assert offer.mean_s is not None
    return offer.mean_s
