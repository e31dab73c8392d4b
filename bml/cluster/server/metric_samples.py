"""The values of a server's metrics: what its parts have counted. Nothing is reset, so anybody may ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bml.cluster.server.shell import ServerShell
from bml.metrics.samples import Sample
from bml.metrics.table import REASONS, SUSPICION_KINDS

_OF_LINKS = {
    "bml_queued_bytes": "nbytes_queued",
    "bml_queued_frames": "frames_queued",
    "bml_copied_sent_bytes_total": "nbytes_copied_sent",
    "bml_copied_received_bytes_total": "nbytes_copied_received",
    "bml_zero_copy_sent_bytes_total": "nbytes_zero_copy_sent",
    "bml_zero_copy_received_bytes_total": "nbytes_zero_copy_received",
}


def metric_samples(shell: ServerShell, now: float) -> list[Sample]:
    """The metrics of a server, under the guard of its poller; by the clock of time.monotonic."""
    return [*_of_steps(shell), *_of_views(shell), *_of_nics(shell, now), *_of_state(shell)]


def _of_steps(shell: ServerShell) -> Iterator[Sample]:
    counts, throughput = shell.mailbox.counts, shell.throughput
    own_steps = 0 if throughput is None else throughput.n_own_steps
    yield Sample("bml_step_seconds", (), counts.steps.value)
    yield Sample("bml_steps_total", (), counts.never_less(shell.mailbox.steps - own_steps))
    if throughput is None:
        return
    yield Sample("bml_exposed_seconds_total", (), throughput.exposed_s())
    yield Sample("bml_samples_total", (), throughput.n_samples)
    yield Sample("bml_samples_recomputed_total", (), throughput.n_recomputed)
    goodput = throughput.goodput()
    if goodput is not None:
        yield Sample("bml_goodput_ratio", (), goodput)


def _of_views(shell: ServerShell) -> Iterator[Sample]:
    core, counts = shell.core, shell.mailbox.counts
    counts.take_recovered(core.views)
    yield Sample("bml_view_epoch", (), core.epoch)
    yield Sample("bml_view_servers", (), 0 if core.view is None else len(core.view.members))
    for reason in REASONS:
        yield Sample("bml_view_changes_total", (reason,), counts.views[reason])
    yield Sample("bml_noticed_seconds", (), counts.noticed.value)
    yield Sample("bml_recovered_seconds", (), counts.recovered.value)
    for kind in SUSPICION_KINDS:
        yield Sample("bml_suspicions_total", (kind,), counts.suspicions[kind])
    yield Sample("bml_suspected_links", (), len(core.suspicions))
    for level, late_s in core.heartbeat_delays_s().items():
        yield Sample("bml_heartbeat_delay_seconds", (str(level),), late_s)


def _of_nics(shell: ServerShell, now: float) -> Iterator[Sample]:
    stats = shell.opened.transport.stats()
    nics = shell.nics.status(stats, now)
    for nic in nics:
        labels = (str(nic["level"]),)
        yield Sample("bml_nic_sent_bytes_total", labels, nic["nbytes_sent"])
        yield Sample("bml_nic_received_bytes_total", labels, nic["nbytes_received"])
        if nic["carrier"] is not None:
            yield Sample("bml_nic_carrier", labels, int(nic["carrier"]))
    for metric, counter in _OF_LINKS.items():
        sums = Counter({nic["level"]: 0 for nic in nics})
        for (_, level), link in stats.items():
            sums[level] += getattr(link, counter)
        for level, total in sums.items():
            yield Sample(metric, (str(level),), total)
    yield Sample("bml_contribution_copied_bytes_total", (), shell.runner.nbytes_copied)


def _of_state(shell: ServerShell) -> Iterator[Sample]:
    counts = shell.mailbox.counts
    yield Sample("bml_state_sent_bytes_total", (), counts.state_sent_nbytes)
    yield Sample("bml_state_received_bytes_total", (), counts.state_received_nbytes)
    checkpoints = shell.checkpoints() if shell.checkpoints else None
    if checkpoints is not None:
        yield Sample("bml_checkpoint_steps", (), checkpoints["whole"])
        if checkpoints["age_s"] is not None:
            yield Sample("bml_checkpoint_age_seconds", (), checkpoints["age_s"])
