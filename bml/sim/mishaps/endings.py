"""Training functions that do not end as they should: they raise, return early, or compute without end.

The right reaction is known. An error ends the job for all, and names the server and its error. A
function that returns early leaves the others in a step that cannot be: each of them is told so, and by whom.
A function that computes without end is no failure, as no server can tell it from a long step: the others
wait, no server is evicted for it, and when an operator kills it they go on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from bml.errors import StepMismatch, TrainingError
from bml.sim.judge.promises import PromiseBroken
from bml.sim.mishaps.chaos import Mishap, When
from bml.topology import Fabric
from bml.topology.errors import BmlError

#: kind: weight.
KINDS = {"raise": 3, "return": 3, "endless": 1}
#: How long an operator looks at a job that stands still; longer than anything that the other mishaps last.
OPERATOR_S = 15.0
#: Within this time a job has ended after a training function raised or returned, if nothing else went wrong.
BOUND_S = 1.0

#: Where a view change is under way, once the first view is in force.
_IN_RECOVERY = ("Freeze", "Status", "Propose", "Accepted", "Install")


def draw_ending(chance: random.Random, fabric: Fabric, faults: int) -> Mishap:
    """How the training function of one server ends, and when, in a run with so many other faults."""
    kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
    n = fabric.n_servers
    how = chance.random()
    if faults and how < 0.5:
        point = chance.choice(_IN_RECOVERY)
        asked = n if point == "Status" else 0  # at start-up every server says where it stands twice
        when = When(
            point, n + asked + chance.randint(1, n), chance.choice((0.0, 0.0, 0.003)) * chance.random()
        )
    elif faults and how < 0.7:
        when = When("fault", chance.randint(1, faults), chance.choice((0.0, 0.03, 0.6)) * chance.random())
    else:
        when = When(chance.choice(("submit", "commit")), chance.randint(1, 3 * n), 0.004 * chance.random())
    return Mishap(kind, (chance.choice(fabric.servers),), when)


class Endings:
    """The ends of training functions in a run, and whether each server got the right error for them."""

    def __init__(self) -> None:
        self.last_s: float | None = None
        self._raised: dict[str, int] = {}
        self._returned: set[tuple[int, int]] = set()

    def raised(self, server: int, text: str, now_s: float) -> None:
        """The function of `server` raised; its coordinator got this text."""
        self._raised[text] = server
        self.last_s = now_s

    def returned(self, server: int, step: int, now_s: float) -> None:
        """The function of `server` returned after this step, too early."""
        self._returned.add((server, step))
        self.last_s = now_s

    def check(self, errors: dict[int, BmlError]) -> None:
        """Promise 4: errors of training functions name the one that caused them. Raises PromiseBroken."""
        for server, error in errors.items():
            if isinstance(error, TrainingError) and self._raised.get(str(error)) != error.server:
                raise PromiseBroken(4, f"server {server} is told that {error.server} raised {error}")
            if isinstance(error, StepMismatch) and not any(
                f"function of server {other} returned after step {step};" in str(error)
                for other, step in self._returned
            ):
                raise PromiseBroken(4, f"server {server} is told {error}, no function returned then")

    def check_told(self, whole: Iterable[int], errors: dict[int, BmlError]) -> None:
        """Promise 4: an error on one of `whole`, which no mishap befell, reaches all of them."""
        whole = tuple(whole)
        failed = [text for text, server in self._raised.items() if server in whole]
        for server in whole if failed else ():
            if not self.excuse(errors.get(server)):
                raise PromiseBroken(
                    4, f"server {server} ends with {errors.get(server)!r}, not with {failed[0]}"
                )

    def excuse(self, error: BmlError | None) -> bool:
        """Whether a server with this error need not have all results."""
        return isinstance(error, TrainingError | StepMismatch)

    def check_bound(self, faults: int, ended_s: float) -> None:
        """Promise 4: the job ends within a bound, if there was no other mishap."""
        if faults == 1 and self.last_s is not None and ended_s - self.last_s > BOUND_S:
            late_s = ended_s - self.last_s
            raise PromiseBroken(4, f"the job ended {late_s:.3f} s after its training function had")
