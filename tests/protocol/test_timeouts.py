"""All time-outs follow from detect_s, in an order that is checked."""

from dataclasses import astuple, replace

import pytest

from bml.faults import Detector
from bml.faults.stalls import Flow
from bml.protocol.server.watch import Watch
from bml.protocol.timeouts import DEFAULT_DETECT_S, Timeouts
from bml.protocol.wire import messages as msg
from bml.topology import parse
from bml.topology.errors import UsageError


@pytest.mark.parametrize("detect_s", [0.05, 0.1, 0.5, 1, 5, 60])
def test_the_order_is_safe_for_every_setting(detect_s: float) -> None:
    made = Timeouts.of(detect_s)
    made.check()
    assert made.proof_window_s < made.heartbeat_s < made.silence_window_s < made.detect_s
    assert made.detect_s < made.answer_s < made.connect_s < made.start_s
    assert 4 * made.heartbeat_s <= made.detect_s, "four heartbeats may be lost"


@pytest.mark.parametrize("detect_s", [0, -1, 0.049, 61, float("nan"), float("inf")])
def test_other_settings_are_refused(detect_s: float) -> None:
    with pytest.raises(UsageError, match=r"0\.05 to 60"):
        Timeouts.of(detect_s)


def test_a_wrong_order_is_refused() -> None:
    made = Timeouts.of()
    for field in ("proof_window_s", "heartbeat_s", "silence_window_s", "answer_s", "connect_s"):
        with pytest.raises(UsageError, match="out of order"):
            replace(made, **{field: 1000.0}).check()


def test_the_heartbeat_is_the_detectors() -> None:
    made = Timeouts.of()
    assert made.detect_s == DEFAULT_DETECT_S
    assert Detector(0, (), made.detect_s, 0.0).interval_s == pytest.approx(made.heartbeat_s)


def test_start_is_waited_for_as_asked() -> None:
    assert Timeouts.of(0.5, start_s=120).start_s == 120
    assert Timeouts.of(0.5, start_s=0).start_s == 4
    assert all(value > 0 for value in astuple(Timeouts.of(0.5, start_s=0)))


@pytest.mark.parametrize(("detect_s", "measure_s"), [(0.05, 1.0), (0.2, 1.0), (0.5, 1.0), (2.0, 4.0)])
def test_rounds_of_measurements_last_a_second_at_least(detect_s: float, measure_s: float) -> None:
    """For how long processes wait for a core does not depend on `detect_s`."""
    assert Timeouts.of(detect_s).measure_s == measure_s
    watch = Watch(0, parse("bcube:2x2"), detect_s, now=0.0)
    watch.set_view(msg.View(1, (0, 1, 2, 3), (), 0, "", 0.0), frozenset({(1, 0)}), now=0.0)
    said = []
    for n in range(1, 101):
        at = 0.05 * n
        watch.flows({(1, 0): Flow(True, n, 0, 50_000 * n, 0.05 * n)}, at)
        said += [at for done in watch.tick(at) if isinstance(getattr(done, "message", None), msg.Measured)]
    assert said[0] == pytest.approx(measure_s)
    assert len(said) == 5 // measure_s
