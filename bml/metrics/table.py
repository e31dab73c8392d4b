"""The table of all metrics: name, kind, unit, labels, help, and where each comes from.

The endpoint of the launcher, Ray's endpoint, the dashboard and the reference page are made from it. Names
follow Prometheus' conventions: base units, counters end in `_total`. No label ever holds a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

STEP_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0,
)  # fmt: skip
"""Upper bounds of the buckets of step times, in seconds."""
FAILURE_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""The same of the times in which failures are noticed and survived."""

REASONS = ("switch", "server", "link", "join", "caught-up", "healed", "slow", "other")
"""Values of the label `reason`: of several causes of one view the first counts."""
SUSPICION_KINDS = ("silence", "reset", "stall", "own-nic", "no-answer")
"""Values of the label `kind`, see `bml.faults.Suspicion`."""


@dataclass(frozen=True)
class Metric:
    """One metric. `labels` come after `job`, and for a metric of servers after `server`.

    `source` is the part of bml that counts it; `of_servers`: every server has its own; `bounds` are the upper
    bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    source: str
    labels: tuple[str, ...] = ()
    of_servers: bool = True
    bounds: tuple[float, ...] = ()

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Its labels, in order."""
        return ("job", *(("server",) if self.of_servers else ()), *self.labels)

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which Prometheus keeps it."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


_STEPS, _SESSION, _VIEWS = "the mailbox of training thread and loop", "the session", "the server's views"
_LINKS, _WATCH, _STATE = (
    "the counters of the connections",
    "the failure detector",
    "the transfer of the state",
)

TABLE: tuple[Metric, ...] = (
    Metric(
        "bml_step_seconds", "histogram", "seconds",
        "Time from the result of one step to that of the next, on this server.", _STEPS, bounds=STEP_BOUNDS,
    ),
    Metric(
        "bml_steps_total", "counter", "steps",
        "Steps that were committed, and that the training function asked for.", _STEPS,
    ),
    Metric(
        "bml_exposed_seconds_total", "counter", "seconds",
        "Time that the training function spent in calls that wait for a step: communication that no "
        "computation hides, and waits for slower servers.", _SESSION,
    ),
    Metric(
        "bml_samples_total", "counter", "samples",
        "Samples of committed batches, of all servers together.", _SESSION,
    ),
    Metric(
        "bml_samples_recomputed_total", "counter", "samples",
        "Samples of lost servers that this one computed in their place, once for each part of a gradient.",
        _SESSION,
    ),
    Metric(
        "bml_goodput_ratio", "gauge", "ratio",
        "Samples per second over all steps, relative to those of steps with the most servers in which no "
        "view changed. Only with session.batches.", _SESSION,
    ),
    Metric("bml_view_epoch", "gauge", "number", "Number of the view in force.", _VIEWS),
    Metric("bml_view_servers", "gauge", "servers", "Servers of the view in force.", _VIEWS),
    Metric(
        "bml_view_changes_total", "counter", "views",
        "Views that this server lived through after its first, by what changed.", _VIEWS, ("reason",),
    ),
    Metric(
        "bml_noticed_seconds", "histogram", "seconds",
        "Time from the last sign of life to the diagnosis, for each view after a failure.", _VIEWS,
        bounds=FAILURE_BOUNDS,
    ),
    Metric(
        "bml_recovered_seconds", "histogram", "seconds",
        "Time from the freeze of a view to the first commit in the next one.", _VIEWS, bounds=FAILURE_BOUNDS,
    ),
    Metric(
        "bml_suspicions_total", "counter", "suspicions",
        "Suspicions that this server told the coordinator.", _WATCH, ("kind",),
    ),
    Metric("bml_suspected_links", "gauge", "links", "Links that this server suspects now.", _WATCH),
    Metric(
        "bml_heartbeat_delay_seconds", "gauge", "seconds",
        "By how much the latest of the last 100 heartbeats of any peer was late, by level.", _WATCH,
        ("level",),
    ),
    Metric(
        "bml_nic_sent_bytes_total", "counter", "bytes",
        "Bytes of frames that this NIC sent, headers included.", _LINKS, ("level",),
    ),
    Metric(
        "bml_nic_received_bytes_total", "counter", "bytes",
        "Bytes of frames that this NIC received, headers included.", _LINKS, ("level",),
    ),
    Metric(
        "bml_nic_carrier", "gauge", "boolean",
        "1 if the NIC has a carrier, 0 if not. Only where the kernel tells.", "the watch on carriers",
        ("level",),
    ),
    Metric("bml_queued_bytes", "gauge", "bytes", "Bytes that wait to be sent.", _LINKS, ("level",)),
    Metric("bml_queued_frames", "gauge", "frames", "Frames that wait to be sent.", _LINKS, ("level",)),
    Metric(
        "bml_copied_sent_bytes_total", "counter", "bytes",
        "Payload that this process copied before it was sent. Over bml_nic_sent_bytes_total: copies a byte.",
        _LINKS, ("level",),
    ),
    Metric(
        "bml_copied_received_bytes_total", "counter", "bytes",
        "Payload that this process copied after it was received.", _LINKS, ("level",),
    ),
    Metric(
        "bml_zero_copy_sent_bytes_total", "counter", "bytes",
        "Payload that peers of the same host read in this server's memory; no NIC carries it.", _LINKS,
        ("level",),
    ),
    Metric(
        "bml_zero_copy_received_bytes_total", "counter", "bytes",
        "Payload that this server read in the memory of peers of its host.", _LINKS, ("level",),
    ),
    Metric(
        "bml_contribution_copied_bytes_total", "counter", "bytes",
        "Contributions that were copied into shared memory because session.empty had not made them.",
        "the steps over shared memory",
    ),
    Metric(
        "bml_state_sent_bytes_total", "counter", "bytes",
        "Bytes of training state that this server sent to joiners.", _STATE,
    ),
    Metric(
        "bml_state_received_bytes_total", "counter", "bytes",
        "Bytes of training states that arrived whole at this server, when it joined.", _STATE,
    ),
    Metric(
        "bml_checkpoint_steps", "gauge", "steps",
        "Steps of the newest checkpoint that all servers know to be whole. Only with checkpoints.",
        "the writer of checkpoints",
    ),
    Metric(
        "bml_checkpoint_age_seconds", "gauge", "seconds",
        "Time since this server wrote its newest part of a checkpoint. Only with checkpoints.",
        "the writer of checkpoints",
    ),
    Metric(
        "bml_server_answers", "gauge", "boolean",
        "1 if the server answered the launcher within a second, 0 if it did not: it is frozen, or too busy.",
        "the launcher", ("server",), of_servers=False,
    ),
    Metric(
        "bml_servers_lost", "gauge", "servers",
        "Servers that are lost and not back; those that left are not lost.",
        "the launcher", of_servers=False,
    ),
    Metric(
        "bml_spares", "gauge", "processes", "Spares that wait for the place of a lost server.",
        "the launcher", of_servers=False,
    ),
)  # fmt: skip

METRICS = {metric.name: metric for metric in TABLE}
"""Name -> metric."""
