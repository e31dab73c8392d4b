"""The decision of a view: whether the last step is committed or tried again.

docs/explanation/protocol.md says why the decision is safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from bml.faults import Suspicion
from bml.protocol.step.spans import Spans, common, size
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import View
from bml.topology import Fabric

_MOST_SPANS = 4096
"""More pieces than that are not worth their message."""


def epoch_of(view: View | None) -> int:
    """Its epoch, 0 for none."""
    return view.epoch if view else 0


def counts_as_alive(fabric: Fabric, suspicion: Suspicion | msg.Suspect) -> bool:
    """Whether the suspected part still counts as alive on this fabric."""
    observer, peer, level = suspicion.observer, suspicion.peer, suspicion.level
    if observer not in fabric.servers or not fabric.nic_alive(observer, level):
        return False
    return peer == observer or peer in fabric.neighbours(observer, level)


def newest_epoch(statuses: Iterable[msg.Status], old: View | None) -> int:
    """That of the newest view that any survivor or the coordinator (`old`) knows, 0 if none does."""
    views = (view for status in statuses for view in (status.installed, status.accepted))
    return max(epoch_of(old), *map(epoch_of, views))


def final_everywhere(statuses: Iterable[msg.Status], commit: int, old: View | None = None) -> Spans:
    """The elements of step commit + 1 that are final on all of them, in the newest view that any knows.

    Only a step whose contributors stay may keep them, which the caller checks. Returns none if they are less
    than half: to go on takes copies of the rest of input and output, beside the memory of the try before, and
    a step may take no more than two vectors in all.
    """
    known = list(statuses)
    newest = newest_epoch(known, old)
    if any(status.committed != commit or epoch_of(status.installed) != newest for status in known):
        return ()
    found = reduce(common, (status.final for status in known))
    enough = 2 * size(found) >= max(status.n_elements for status in known)
    return found if enough and len(found) <= _MOST_SPANS else ()


def decide(statuses: Iterable[msg.Status], old: View | None = None) -> int:
    """The step that is committed as of the next view, given the status of every survivor.

    `old` is the newest view that the coordinator knows. The statuses must not name proposals that it has
    abandoned before all members had accepted them: those were never in force, and never will be.

    If any survivor committed a step, then all were complete: all commit it. If all are complete, all
    commit. Else the step is tried again. A step counts as complete only under the newest view that any
    survivor knows: an older one's outputs have other contributors.
    """
    known = list(statuses)
    assert known, "no server has survived, so there is nothing to decide"
    newest = newest_epoch(known, old)
    views = [old, *(view for status in known for view in (status.installed, status.accepted))]
    binding = (view.commit for view in views if view is not None and view.epoch == newest)
    commit = max([*(status.committed for status in known), *binding])
    following = commit + 1
    for status in known:
        epoch = status.installed.epoch if status.installed else 0
        if status.committed >= following or (status.complete == following and epoch == newest):
            continue
        return commit
    return following
