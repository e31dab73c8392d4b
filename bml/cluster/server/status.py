"""What a server answers while it runs, to `bml status` and others, and what it puts into the report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bml.cluster.server.assembly import Assembly
from bml.cluster.server.metric_samples import metric_samples
from bml.cluster.server.shell import ServerShell
from bml.cluster.spec.job import Contact, Request
from bml.predict.step_time import Foretold
from bml.protocol.coordinator.election import Seen
from bml.protocol.server.core import ServerCore
from bml.protocol.step.spans import size
from bml.protocol.wire.messages import slow_nics
from bml.topology.errors import BmlError
from bml.transport.choice import Opened
from bml.transport.interface import Transport

_LOG = logging.getLogger(__name__)

_COUNTERS = (
    "nbytes_sent",
    "nbytes_received",
    "nbytes_copied_sent",
    "nbytes_copied_received",
    "nbytes_zero_copy_sent",
    "nbytes_zero_copy_received",
)


class Membership(NamedTuple):
    """What a server knows of its coordinator and of the other servers.

    `seen`: what counts for the election of a coordinator.
    """

    seen: Seen
    contacts: dict[int, Contact]
    incarnations: dict[int, int]


def answer(shell: Assembly, request: Request, reply: Callable[[dict[str, Any]], None]) -> None:
    """Answer a request, in the loop's thread.

    "status": where this server stands (see `status`). "inject": `{"done": what it will do to itself}`, said
    before it is done, `""` if it is no matter of this server's; `{"error": why}`. "leave": it will leave, for
    the reason that is given. "record": `{"recording": packed}`. "metrics": `{"samples": samples}` (see
    bml.cluster.server.metric_samples). "suspects": its own parts of which it warns (see Forecast.suspects).
    "take-out": `{"done": whether it takes out that part}`. A question that cannot be answered has
    `{"error": why}`, too, as an exception here would end this server.
    """
    try:
        if request[0] == "record":
            shell.send_recording(request[1], reply)
            return
        said = _answer(shell, *request)
    except BmlError as error:
        said = {"error": str(error)}
    except Exception as error:
        _LOG.exception("server %d cannot answer %s", shell.core.server, request[0])
        said = {"error": f"{type(error).__name__}: {error}"}
    reply(said)


def _answer(shell: Assembly, kind: str, argument: str) -> dict[str, Any]:
    now = time.monotonic()
    match kind:
        case "inject":
            return {"done": shell.injection.add(argument, shell.core, now)}
        case "leave":
            shell.handover.ask_to_leave(argument)
            return {}
        case "suspects":
            return shell.forecast.suspects(now)
        case "take-out":
            return {"done": shell.forecast.take_out(argument)}
        case "metrics":
            return {"samples": metric_samples(shell, now)}
    return status(shell, now)


def status(shell: ServerShell, now: float) -> dict[str, Any]:
    """Where the server stands; to be asked in its loop's thread, by the clock of time.monotonic."""
    core, opened = shell.core, shell.opened
    stats = opened.transport.stats()
    return {
        "process": os.getpid(),
        "epoch": core.epoch,
        "step": core.step,
        "phase": shell.injection.phase(core),
        "progress": core.progress,
        "transport": {
            **transport_used(opened),
            "zero_copy_to": [] if opened.zero_copy is None else list(opened.zero_copy.partners),
            **{each: sum(getattr(link, each) for link in stats.values()) for each in _COUNTERS},
        },
        "waits_for": shell.runner.waits_for() or core.waits_for(),
        "suspects": [
            {"peer": each.peer, "level": each.level, "kind": each.kind, "why": each.why}
            for each in core.suspicions
        ],
        "nics": shell.nics.status(stats, now),
        "shares": shell.shares,
        "checkpoints": shell.checkpoints() if shell.checkpoints else None,
        "sizes": shell.sizes(),
        "predicted": shell.predicted(),
        "remaining": shell.remaining(now),
        "warnings": shell.warnings(now),
        "faults": [str(fault) for fault in shell.injection.pending],
    }


def transport_used(opened: Opened) -> dict[str, Any]:
    """Which transport a server uses, and over what."""
    return {
        "name": opened.name,
        "traffic_class": opened.traffic_class,
        "devices": list(opened.devices),
        "fallback": opened.fallback,
    }


def view_records(core: ServerCore, foretold: Callable[[int], Foretold]) -> list[dict[str, object]]:
    """The views that a server lived through, each with what was `foretold` of it.

    `at_s`: when each came, in seconds after the first of the job; None if this server did not see that one.
    """
    first = core.views[0] if core.views and core.views[0].view.epoch == 1 else None
    return [
        {
            "epoch": record.view.epoch,
            "members": list(record.view.members),
            "failures": list(record.view.failures),
            "slow": slow_nics(record.view),
            "at_s": None if first is None else round(record.installed_at_s - first.installed_at_s, 6),
            "commit": record.view.commit,
            "kept": size(record.view.final),
            "reason": record.view.reason,
            "noticed_s": record.view.noticed_s,
            "recover_s": record.recover_s,
            "predicted_s": foretold(record.view.epoch).predicted_s,
            "measured_s": foretold(record.view.epoch).measured_s,
            "predicted_from": foretold(record.view.epoch).basis,
        }
        for record in core.views
    ]


def link_stats(transport: Transport) -> dict[str, dict[str, int]]:
    """Counters per "peer/level"."""
    return {f"{peer}/{level}": stats._asdict() for (peer, level), stats in transport.stats().items()}
