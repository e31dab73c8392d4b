"""The coordinator's list of joiners: servers that wait to be let in, and the progress of learners."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bml.protocol.wire.messages import Incarnation, View
from bml.topology import Fabric, Failure


class Joiners:
    """Joiners that wait to be let in, learners that have caught up, and servers that can send them state."""

    def __init__(self) -> None:
        self._waiting: dict[int, Incarnation] = {}
        self._out_of_reach: dict[int, frozenset[str]] = {}  # with these failures
        self._can_send_state: set[int] = set()
        self._caught_up: set[int] = set()
        self._need_state: set[int] = set()

    def asks_to_join(self, incarnation: Incarnation) -> None:
        """A join request: a server, in an incarnation that is in no view, wants to be let in."""
        self._waiting[incarnation.server] = incarnation

    @property
    def waiting(self) -> tuple[int, ...]:
        """The servers that wait to be let in."""
        return tuple(sorted(self._waiting))

    def waits(self, server: int) -> bool:
        """Whether this server waits to be let in."""
        return server in self._waiting

    def drop(self, server: int) -> None:
        """Forget a server: it is dead, or has left."""
        self._waiting.pop(server, None)
        self._out_of_reach.pop(server, None)
        self._can_send_state.discard(server)
        self._caught_up.discard(server)
        self._need_state.discard(server)

    def can_send_state(self, server: int) -> None:
        """Its training function comes to boundaries, at which it can send the state."""
        self._can_send_state.add(server)

    def caught_up(self, server: int) -> None:
        """A learner could contribute."""
        self._caught_up.add(server)

    def needs_state(self, server: int) -> None:
        """A learner needs a later state than the one that was sent to it, or that is on its way."""
        self._need_state.add(server)

    def admitted(self, view: View | None) -> dict[int, Incarnation]:
        """The servers that can be let in after this view, by incarnation; none until all can send state.

        A server that could not be reached waits until something else is broken, or less.
        """
        if view is None or not self._can_send_state.issuperset(view.contributors):
            return {}
        failures = frozenset(view.failures)
        return {
            server: incarnation
            for server, incarnation in sorted(self._waiting.items())
            if server not in view.members and self._out_of_reach.get(server) != failures
        }

    def reached(
        self, admitted: Mapping[int, Incarnation], members: Iterable[int], failures: Iterable[Failure]
    ) -> dict[int, Incarnation]:
        """The `admitted` servers that are among the next members; the others go on waiting."""
        inside = {*members}
        for server in admitted.keys() - inside:
            self._out_of_reach[server] = frozenset(map(str, failures))
        return {server: incarnation for server, incarnation in admitted.items() if server in inside}

    def promoted(self, view: View | None) -> frozenset[int]:
        """The learners of this view that can contribute after it."""
        return frozenset(self._caught_up.intersection(view.learners) if view else ())

    def behind(self, view: View | None) -> frozenset[int]:
        """The learners of this view that need a later state, which the next view brings."""
        return frozenset(self._need_state.intersection(view.learners) if view else ())

    def settle(self, view: View) -> None:
        """A view is in force: its members wait no more, and its learners must report their progress again."""
        for incarnation in view.joined:
            if self._waiting.get(incarnation.server) == incarnation:
                del self._waiting[incarnation.server]
        self._caught_up.clear()
        self._need_state.clear()


def works_again(fabric: Fabric, standing: Iterable[str], admitted: Iterable[int]) -> frozenset[str]:
    """The failures that end when these servers are let in: theirs, and those of their links if all were dead.

    Their links were found dead in an earlier incarnation. A server without any link could not even show that
    they work. If they do not, that will be noticed as it was before.
    """
    back = {f"server:{server}" for server in admitted}
    left = fabric.without(*(part for part in standing if part not in back))
    levels = range(fabric.levels)
    alone = [server for server in admitted if not any(left.neighbours(server, level) for level in levels)]
    return frozenset(back | {f"link:{server}/{level}" for server in alone for level in levels})


def learners_of(
    members: Iterable[int], view: View | None, admitted: Mapping[int, Incarnation], promoted: Iterable[int]
) -> tuple[int, ...]:
    """Those of the next members that contribute nothing yet."""
    learning = ({*view.learners} if view else set()) - {*promoted} | admitted.keys()
    return tuple(server for server in members if server in learning)


def incarnations_of(
    members: Iterable[int], view: View | None, admitted: Mapping[int, Incarnation]
) -> tuple[Incarnation, ...]:
    """The incarnations of those of the next members that joined."""
    known = {incarnation.server: incarnation for incarnation in view.joined} if view else {}
    incarnations = known | dict(admitted)
    return tuple(incarnations[server] for server in members if server in incarnations)
