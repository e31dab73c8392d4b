"""How long a link may take to come up."""

from __future__ import annotations

from bml.io.poller import Poller
from bml.transport.links.opening import Opening


def test_another_view_that_wants_the_link_counts_the_time_anew() -> None:
    poller, failed = Poller(lambda: None), []
    opening = Opening(poller, None, lambda kind, why: failed.append((kind, why)), timeout_s=0.2)
    try:
        begun_s = poller.due_s
        poller.poll(0.05)
        opening.begin_anew()
        assert poller.due_s > begun_s
        while not failed:
            poller.poll(1.0)
        assert failed[0][0] == "timeout"
    finally:
        poller.close()
