"""Finds what is broken from suspicions: the smallest set of failures that explains all of them.

A suspicion (observer, peer, level) says that one of five parts is dead: the peer's NIC on that level, the
observer's own, the switch between them, the peer, the observer. Diagnosis is a minimum hitting set over
these: fewest failures first, then the least damage (NICs killed), then those that most observers accuse, then
those that cut off the fewest servers, then a fixed order. It is exact for few failures and greedy, bounded,
beyond. A switch or a server is blamed only if nothing about it still works. So is a NIC, unless nothing else
explains a suspicion: the living are not blamed, also where more are dead.

A connection that stands still (`stall`) says nothing about which end is to blame: only a sender can notice.
So it accuses no end; one of the two NICs is given up, and with several such connections the one they share.
Of two equals it is the one that loses segments, if the observers know: packets are lost there.

Equivalent cases, in which no observation can tell the truth: the two NICs of a switch with two live ports and
that switch itself (the NIC more accused, then that of the lower server, is blamed); the last live NIC of a
server and the server (the server is blamed); a switch with one live port is never noticed.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from bml.faults.detector import Suspicion
from bml.topology import (
    Fabric,
    FabricError,
    Failure,
    InvariantError,
    LinkFailure,
    ServerFailure,
    SwitchFailure,
)

Pair: TypeAlias = tuple[int, int, int]
"""(level, lower server, higher server): two neighbours of which one at least does not hear the other."""

Places: TypeAlias = tuple[int, ...]
"""A set of failures, each by its place in their order, ascending once it is complete."""

SEARCH_NODES = 20_000
"""Bound of the exact search, about 0.3 s; ten failures at once on 64 servers stay below it."""

COMPARED_SETS = 64
"""Only of so few equally good sets it is asked how many servers each would cut off: a millisecond each."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a coordinator: servers that are gone, and the suspicions that stand.

    `gone`: server → what is known of it, in words that follow "server 4": "is dead: …", after an exited
    process or a refused connection, "leaves: …", or "did not appear". Silence is a suspicion.
    """

    gone: Mapping[int, str] = field(default_factory=dict)
    suspicions: tuple[Suspicion, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The new failures, in order, and the `reason` in words; both are empty when nothing is broken."""

    failures: tuple[Failure, ...]
    reason: str


class Settlement(NamedTuple):
    """The `members` of the next view, all new `failures` (the cut-off servers too), and the `reason`."""

    members: tuple[int, ...]
    failures: tuple[Failure, ...]
    reason: str


def diagnose(fabric: Fabric, evidence: Evidence) -> Diagnosis:
    """Find what is broken in `fabric`, that of the current view; what it knows to be dead is not repeated.

    Raises InvariantError for a suspicion between servers that are not neighbours on that level.
    """
    for suspicion in evidence.suspicions:
        _check(fabric, suspicion)
    found = _certain(fabric, evidence)
    left = fabric.without(*found)
    seen = [one for one in evidence.suspicions if _is_open(left, one)]
    for failure in _Cover(left, seen).smallest():
        found[failure] = _in_words(failure, fabric, seen)
    _promote(fabric, found, seen)
    failures = tuple(sorted(found))
    return Diagnosis(failures, "; ".join(found[one] for one in failures))


def settle(fabric: Fabric, failures: Iterable[Failure], heard: Collection[int] = ()) -> Settlement:
    """Decide which servers go on after `failures`: the largest part whose servers reach one another.

    Of parts of one size, that goes on of which most servers were `heard`, as the others may be dead; then the
    one with the lowest id. Live servers outside it become server failures, "cut off"; the reason is empty
    when there are none. Raises FabricError when no server is left.
    """
    broken = set(failures)
    parts = fabric.without(*broken).components()
    if not parts:
        raise FabricError(f"no server of {fabric.name} is left alive; start the job again")
    members = max(parts, key=lambda part: (len(part), sum(server in heard for server in part)))
    outside = sorted(server for part in parts if part is not members for server in part)
    broken.update(ServerFailure(server) for server in outside)
    reason = f"{_servers(outside)} cut off from the other {len(members)}" if outside else ""
    return Settlement(members, tuple(sorted(broken)), reason)


def _check(fabric: Fabric, one: Suspicion) -> None:
    servers, levels = range(fabric.n_servers), range(fabric.levels)
    off_fabric = one.kind == "no-answer" and one.level < 0 and one.peer in servers
    own = one.kind == "own-nic" and one.observer in servers and one.level in levels
    if off_fabric or own:
        return
    known = one.observer in servers and one.peer in servers and one.level in levels
    if (
        not known
        or one.observer == one.peer
        or fabric.group(one.observer, one.level) != fabric.group(one.peer, one.level)
        or fabric.group(one.observer, one.level) < 0
    ):
        raise InvariantError(
            f"server {one.observer} suspects server {one.peer} on level {one.level} ({one.kind}), "
            f"but they are not neighbours there in {fabric.name}"
        )


def _certain(fabric: Fabric, evidence: Evidence) -> dict[Failure, str]:
    """Failures that need no search: servers gone or without an answer, NICs that report themselves."""
    found: dict[Failure, str] = {}
    for server, what in sorted(evidence.gone.items()):
        if fabric.server_alive(server):
            found[ServerFailure(server)] = f"server {server} {what}"
    for one in evidence.suspicions:
        if one.kind == "no-answer" and one.level < 0 and fabric.server_alive(one.peer):
            found.setdefault(ServerFailure(one.peer), f"server {one.peer} does not answer: {one.why}")
    for one in evidence.suspicions:
        if one.kind == "own-nic" and fabric.without(*found).nic_alive(one.observer, one.level):
            nic = LinkFailure(one.observer, one.level)
            found[nic] = f"NIC {one.observer}/{one.level} is dead, its own server says: {one.why}"
    return _gathered_at_switches(fabric, found)


def _gathered_at_switches(fabric: Fabric, found: dict[Failure, str]) -> dict[Failure, str]:
    """Turn the NICs of a switch into the failure of that switch, if all that live say that they are dead."""
    for level, group in fabric.switches:
        nics = [LinkFailure(server, level) for server in fabric.attached(level, group)]
        if len(nics) > 1 and all(nic in found for nic in nics):
            for nic in nics:
                del found[nic]
            say = _and([nic.server for nic in nics])
            found[SwitchFailure(level, group)] = (
                f"switch {level}/{group} is dead: no NIC on it works, {say} say"
            )
    return found


def _is_open(left: Fabric, one: Suspicion) -> bool:
    """Whether this suspicion is still to be explained: both NICs are taken to be alive so far."""
    if one.kind == "own-nic" or one.level < 0:
        return False
    return left.nic_alive(one.observer, one.level) and left.nic_alive(one.peer, one.level)


def _promote(fabric: Fabric, found: dict[Failure, str], seen: list[Suspicion]) -> None:
    """Turn the NICs of a server that has none left into the failure of that server."""
    nics = fabric.without(*found).nics
    links = sorted(one for one in found if isinstance(one, LinkFailure))
    for server in sorted({link.server for link in links if not nics[link.server].any()}):
        whys = [found.pop(link) for link in links if link.server == server]
        silent = any(one.kind != "stall" for one in seen if server in (one.observer, one.peer))
        if silent and len(whys) == int((fabric.groups[server] >= 0).sum()) > 1:
            found[ServerFailure(server)] = _server_in_words(server, seen)
        else:
            found[ServerFailure(server)] = f"server {server} has no NIC left: {' and '.join(whys)}"


class _Cover:
    """The hitting-set search: which failures of `left` explain all suspicions `seen`. Sets are bit masks."""

    def __init__(self, left: Fabric, seen: list[Suspicion]) -> None:
        self._left = left
        self._pairs = sorted({_pair(one) for one in seen})
        self._suspected = set(self._pairs)
        self._stalled = self._suspected - {_pair(one) for one in seen if one.kind != "stall"}
        self._alive = self._alive_of({one.observer for one in seen})
        self._accused = Counter((one.peer, one.level) for one in seen if one.kind != "stall")
        self._losing = Counter((one.losing, one.level) for one in seen)
        options = [self._options_of(pair) for pair in self._pairs]
        self._failures = sorted({failure for each in options for failure in each})
        place = {failure: at for at, failure in enumerate(self._failures)}
        self._options = [[place[failure] for failure in each] for each in options]
        self._explains = [0] * len(self._failures)
        for bit, each in enumerate(self._options):
            for at in each:
                self._explains[at] |= 1 << bit
        self._kills = [frozenset(self._nics(failure)) for failure in self._failures]
        self._nodes = 0

    def smallest(self) -> tuple[Failure, ...]:
        """The best set of the smallest size; greedy when the exact search takes more than SEARCH_NODES."""
        everything = (1 << len(self._pairs)) - 1
        for size in range(len(self._pairs) + 1):
            covers: set[Places] = set()
            self._search(everything, size, (), covers)
            if covers:
                return self._named(self._best(covers))
            if self._nodes > SEARCH_NODES:
                break
        return self._named(self._greedy(everything))

    def _named(self, places: Places) -> tuple[Failure, ...]:
        return tuple(self._failures[at] for at in places)

    def _search(self, open_pairs: int, size: int, chosen: Places, covers: set[Places]) -> None:
        """Collect all sets of `size` more failures that explain the open pairs; branch on the first pair."""
        if not open_pairs:
            covers.add(tuple(sorted(chosen)))
            return
        self._nodes += 1
        widest = max((mask & open_pairs).bit_count() for mask in self._explains)
        if self._nodes > SEARCH_NODES or size * widest < open_pairs.bit_count():
            return
        first = (open_pairs & -open_pairs).bit_length() - 1
        for at in self._options[first]:
            self._search(open_pairs & ~self._explains[at], size - 1, (*chosen, at), covers)

    def _greedy(self, open_pairs: int) -> Places:
        chosen: list[int] = []
        while open_pairs:
            best = min(range(len(self._failures)), key=partial(self._greed, open_pairs))
            chosen.append(best)
            open_pairs &= ~self._explains[best]
        return tuple(sorted(chosen))

    def _greed(self, open_pairs: int, at: int) -> tuple[int, int]:
        return -(self._explains[at] & open_pairs).bit_count(), len(self._kills[at])

    def _best(self, covers: set[Places]) -> Places:
        """The best of these sets of one size: see the module's text."""
        equal = _least(_least(covers, self._damage), self._unaccused)
        if len(equal) > COMPARED_SETS:
            return min(equal)
        return min(sorted(equal), key=self._servers_cut_off_and_losses)

    def _damage(self, places: Places) -> int:
        return len(self._nics_of(places))

    def _unaccused(self, places: Places) -> int:
        """The more accusations, the less."""
        return -sum(self._accused[nic] for nic in self._nics_of(places))

    def _servers_cut_off_and_losses(self, places: Places) -> tuple[int, int]:
        """Servers that are cut off, and observers that know of losses at these NICs: the more the better."""
        losses = sum(self._losing[nic] for nic in self._nics_of(places))
        return self._servers_cut_off(self._named(places)), -losses

    def _nics_of(self, places: Places) -> frozenset[tuple[int, int]]:
        return frozenset().union(*(self._kills[at] for at in places))

    def _servers_cut_off(self, failures: tuple[Failure, ...]) -> int:
        parts = self._left.without(*failures).components()
        return len(self._left.servers) - max(map(len, parts), default=0)

    def _nics(self, failure: Failure) -> list[tuple[int, int]]:
        """The live NICs that this failure would kill."""
        match failure:
            case LinkFailure(server, level):
                return [(server, level)]
            case SwitchFailure(level, group):
                return [(server, level) for server in self._left.attached(level, group)]
            case ServerFailure(server):
                alive = range(self._left.levels)
                return [(server, level) for level in alive if self._left.nic_alive(server, level)]

    def _options_of(self, pair: Pair) -> list[Failure]:
        """The parts whose death would explain this pair, without those of which something still works.

        If nothing is left, one of its NICs is broken in part. So it is, too, where heartbeats pass.
        """
        level, low, high = pair
        switch = SwitchFailure(level, self._left.group(low, level))
        nics: list[Failure] = [LinkFailure(low, level), LinkFailure(high, level)]
        wide = [part for part in (ServerFailure(low), ServerFailure(high), switch) if self._all_silent(part)]
        silent = [nic for nic in nics if self._all_silent(nic)]
        return [*(nics if pair in self._stalled or not (silent or wide) else silent), *wide]

    def _all_silent(self, failure: Failure) -> bool:
        """Whether no pair of neighbours that needs this part is known to work.

        A pair works if it is not suspected and one of the two is known to be alive: it would suspect the
        other.
        """
        return all(
            pair in self._suspected or not self._alive.intersection(pair[1:])
            for nic in self._nics(failure)
            for pair in self._pairs_of(*nic)
        )

    def _alive_of(self, reporters: set[int]) -> set[int]:
        """Those that report suspicions, and those that they hear on some level: they would suspect them."""
        heard = {
            sum(pair[1:]) - server
            for server in reporters
            for level in range(self._left.levels)
            if self._left.nic_alive(server, level)
            for pair in self._pairs_of(server, level)
            if pair not in self._suspected
        }
        return reporters | heard

    def _pairs_of(self, server: int, level: int) -> Iterable[Pair]:
        others = self._left.neighbours(server, level)
        return ((level, min(server, other), max(server, other)) for other in others)


def _least(covers: Collection[Places], weight: Callable[[Places], int]) -> list[Places]:
    weights = {cover: weight(cover) for cover in covers}
    least = min(weights.values())
    return [cover for cover, its_weight in weights.items() if its_weight == least]


def _pair(one: Suspicion) -> Pair:
    return one.level, min(one.observer, one.peer), max(one.observer, one.peer)


def _in_words(failure: Failure, fabric: Fabric, seen: list[Suspicion]) -> str:
    match failure:
        case LinkFailure(server, level):
            return _nic_in_words(server, level, [one for one in seen if one.level == level])
        case SwitchFailure(level, group):
            cabled = fabric.members(level, group)
            by = sorted({one.observer for one in seen if one.level == level and one.observer in cabled})
            return f"all NICs of switch {level}/{group} are silent (seen by {_list(by)})"
        case ServerFailure(server):
            return _server_in_words(server, seen)


def _server_in_words(server: int, seen: list[Suspicion]) -> str:
    by = sorted({one.observer for one in seen if one.peer == server})
    about = [one for one in seen if server in (one.observer, one.peer)]
    if about and all(one.kind == "stall" for one in about):
        return f"all data connections of server {server} stand still though heartbeats pass"
    how = f"seen by {_list(by)}" if by else "it hears no server"
    return f"server {server} is silent on all its NICs ({how})"


def _nic_in_words(server: int, level: int, seen: list[Suspicion]) -> str:
    about = [one for one in seen if server in (one.observer, one.peer)]
    if about and all(one.kind == "stall" for one in about):
        return _stalls_in_words(server, level, about)
    against = [one for one in seen if one.peer == server]
    if not against:
        heard = sorted({one.peer for one in seen if one.observer == server})
        return f"NIC {server}/{level} hears nothing from {_and(heard)}"
    how = "was reset" if all(one.kind == "reset" for one in against) else "is silent"
    return f"NIC {server}/{level} {how} towards {_and(sorted({one.observer for one in against}))}"


def _stalls_in_words(server: int, level: int, about: list[Suspicion]) -> str:
    others = sorted({one.observer + one.peer - server for one in about})
    if len(others) == 1:
        what = f"the data connection between NIC {server}/{level} and {others[0]}/{level} stands"
    else:
        nics = " and ".join(f"{other}/{level}" for other in others)
        what = f"the data connections between NIC {server}/{level} and {nics} stand"
    losses = f", and NIC {server}/{level} loses segments" * any(one.losing == server for one in about)
    return f"{what} still though heartbeats pass{losses}"


def _servers(servers: list[int]) -> str:
    return f"server {servers[0]} is" if len(servers) == 1 else f"servers {_and(servers)} are"


def _and(servers: list[int]) -> str:
    return " and ".join(filter(None, [_list(servers[:-1]), str(servers[-1])]))


def _list(servers: list[int]) -> str:
    return ", ".join(str(server) for server in servers)
