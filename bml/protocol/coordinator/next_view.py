"""The next view as it follows from the evidence: its members, the failures, and the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bml.faults import Diagnosis, Settlement, diagnose, settle
from bml.protocol.coordinator.evidence import Findings
from bml.protocol.coordinator.joiners import Joiners, incarnations_of, learners_of, works_again
from bml.protocol.coordinator.rates import Rates
from bml.protocol.wire.messages import Incarnation, Rate, View
from bml.topology import Fabric, ServerFailure


@dataclass(frozen=True)
class NextView:
    """The next view without its decision; `members` are empty if the evidence leaves no server.

    `newcomers` are let in by it. `reason` is the evidence in words; `news` has recoveries and joins, too.
    """

    reason: str
    news: str = ""
    members: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()
    failed: tuple[tuple[str, int], ...] = ()
    learners: tuple[int, ...] = ()
    joined: tuple[Incarnation, ...] = ()
    newcomers: frozenset[int] = frozenset()
    rates: tuple[Rate, ...] = ()

    @property
    def contributors(self) -> tuple[int, ...]:
        """The members without those that only learn."""
        return tuple(server for server in self.members if server not in self.learners)

    def view(self, epoch: int, reason: str, noticed_s: float) -> View:
        """The view without its decision."""
        return View(
            epoch=epoch,
            members=self.members,
            failures=self.failures,
            commit=0,
            reason=reason,
            noticed_s=noticed_s,
            failed=self.failed,
            learners=self.learners,
            joined=self.joined,
            rates=self.rates,
        )


def derive_next_view(
    fabric: Fabric,
    view: View | None,
    absent: frozenset[int],
    findings: Findings,
    joiners: Joiners,
    rates: Rates,
) -> NextView:
    """The view that follows `view` on the whole `fabric`; in the first view servers are `absent`.

    Joiners that it does not reach are noted in `joiners`.
    """
    standing = tuple(f"server:{server}" for server in sorted(absent))
    if view is not None:
        standing = tuple(part for part in view.failures if part not in findings.healed)
    admitted, promoted = joiners.admitted(view), joiners.promoted(view)
    back = works_again(fabric, standing, admitted)
    damaged = fabric.without(*(part for part in standing if part not in back))
    evidence = findings.evidence(damaged)
    diagnosis = diagnose(damaged, evidence)
    dead = {failure.server for failure in diagnosis.failures if isinstance(failure, ServerFailure)}
    if dead.issuperset(damaged.servers):
        return NextView(diagnosis.reason)
    settlement = settle(damaged, diagnosis.failures, {each.observer for each in evidence.suspicions})
    broken = {*damaged.failures, *settlement.failures}
    admitted = joiners.reached(admitted, settlement.members, broken)
    failures = tuple(str(each) for each in sorted(broken))
    reason = _explained(diagnosis, settlement)
    good_news = _good_news(findings.healed, admitted, promoted, joiners.behind(view))
    return NextView(
        reason=reason,
        news="; ".join(filter(None, (reason, good_news, rates.news(view)))),
        members=settlement.members,
        failures=failures,
        failed=_failed(view, standing, failures),
        learners=learners_of(settlement.members, view, admitted, promoted),
        joined=incarnations_of(settlement.members, view, admitted),
        newcomers=frozenset(admitted),
        rates=rates.following(view, fabric.without(*failures)),
    )


def _explained(diagnosis: Diagnosis, settlement: Settlement) -> str:
    reason = diagnosis.reason if diagnosis.failures else ""
    more = len(settlement.failures) > len(diagnosis.failures)
    return "; ".join(filter(None, (reason, settlement.reason))) if more else reason


def _good_news(
    healed: frozenset[str], admitted: Iterable[int], promoted: Iterable[int], behind: Iterable[int]
) -> str:
    news = [f"{', '.join(sorted(healed))} works again"] if healed else []
    news += [f"server {server} joins" for server in admitted]
    news += [f"server {server} has caught up" for server in sorted(promoted)]
    news += [f"server {server} needs a later state" for server in sorted(behind)]
    return "; ".join(news)


def _failed(
    view: View | None, standing: Iterable[str], failures: Iterable[str]
) -> tuple[tuple[str, int], ...]:
    """How often links and switches have failed, with those of the next view that are new."""
    times = dict(view.failed) if view else {}
    known = {*standing}
    for part in failures:
        if part not in known and not part.startswith("server:"):
            times[part] = times.get(part, 0) + 1
    return tuple(sorted(times.items()))
