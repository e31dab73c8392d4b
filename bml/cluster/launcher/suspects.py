"""Lets parts go of which their servers give early warnings: `--preempt-suspects`.

No server can know whether the others see the same, so the launcher asks all. bml.predict.suspects decides.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from bml.cluster.fleets.fleet import Answers, Patience
from bml.cluster.spec.job import JobSpec, Request
from bml.io.interruptible import Event
from bml.predict.suspects import Suspects

_LOG = logging.getLogger(__name__)
_LOOK_S = 1.0  # as often as servers judge their own NICs
_PATIENCE = Patience(1.0)

Ask = Callable[[Request, Patience], Answers]


def let_suspects_go(spec: JobSpec, ask: Ask, over: Event) -> None:
    """Look for suspects in a thread of its own until the job is over, if the job wants that."""
    if spec.preempt_suspects:
        thread = threading.Thread(target=_run, args=(spec, ask, over), name="bml-suspects", daemon=True)
        thread.start()


def _run(spec: JobSpec, ask: Ask, over: Event) -> None:
    suspects = Suspects(spec.min_servers)
    while not over.wait(_LOOK_S):
        try:
            look(suspects, ask, time.monotonic())
        except Exception:  # a job goes on without
            if not over.is_set():
                _LOG.exception("%s cannot look for suspects", spec.job)


def look(suspects: Suspects, ask: Ask, now: float) -> str:
    """Ask all servers, and let one part go if there is one; returns that part, else ""."""
    for part in suspects.candidates(ask(("suspects", ""), _PATIENCE), now):
        answers = ask(("take-out", part), _PATIENCE)
        if any(answer.get("done") for answer in answers.values()):
            suspects.taken(now)
            return part
    return ""
