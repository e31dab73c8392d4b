"""A job on Ray over RDMA: servers are actors, each on a Ray node of its own and with two NICs."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SETTINGS, cable
from slow_ray import slow_ray

import bml
from bml.cluster.server.status import transport_used
from bml.train.batches import BatchPlan
from bml.transport.verbs import driver

FABRIC, SERVERS, LEVELS = "bcube:2x2", 4, 2
SAMPLES, GLOBAL_BATCH = 288, 24
STEPS = SAMPLES // GLOBAL_BATCH
SIZE = 60_000
DETECT_S, START_S = 20.0, 600.0
CUT, CUT_STEP, CUT_AFTER_S = (1, 0), 4, 0.1
"""The NIC of which server and level loses its cable, and in which step. Its neighbour there is the victim."""
VICTIM, KILL_STEP = 0, 8


def share(indices: Any) -> Any:
    """The part of a step's sum for these samples: whole numbers, so that any order gives the same bits."""
    x = np.zeros(SIZE, "float32")
    for index in indices:
        x += (np.arange(SIZE, dtype="float32") * (1 + index)) % 127
    return x


def expected() -> Any:
    """The parameters after all steps, as one process computes them."""
    w = np.zeros(SIZE, "float32")
    for batch in BatchPlan(SAMPLES, GLOBAL_BATCH, 1, 0):
        w += share(batch.indices) / np.float32(len(batch.indices))
    return w


def train(session: bml.Session) -> dict[str, Any]:
    """Add every sample's share to the parameters, once; in a step a cable is cut."""
    w = session.empty(SIZE, "float32")
    w[:] = 0
    session.state(params=w)
    ended_s, sent = [time.time()], [sent_by_nic(session)]
    for step, batch in enumerate(session.batches(SAMPLES, global_batch=GLOBAL_BATCH, epochs=1, seed=0), 1):
        if session.server == CUT[0] and step == CUT_STEP:
            threading.Timer(CUT_AFTER_S, cable, (*CUT, "down")).start()
        w += batch.allreduce(share(batch.indices), recompute=share)
        ended_s.append(time.time())
        sent.append(sent_by_nic(session))
    return {
        "wrong": int((w != expected()).sum()),
        "ended_s": ended_s,
        "sent": sent,
        "transport": transport_used(session._communicator._shell.opened),  # type: ignore[attr-defined]
    }


def sent_by_nic(session: bml.Session) -> list[int]:
    """The bytes that this server has sent by each of its NICs."""
    sent = [0] * LEVELS
    links = session._communicator._shell.opened.transport.stats()  # type: ignore[attr-defined]
    for (_, level), stats in links.items():
        sent[level] += stats.nbytes_sent
    return sent


@pytest.fixture(scope="module")
def result() -> bml.Result:
    """One job for all tests: what it needs is set before the fixtures of a single test are."""
    driver._Pyverbs()  # once, for all forks
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        return _run()


def _run() -> bml.Result:
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        slow_ray(Path(folder), SERVERS) as head,
    ):
        began_s = time.time()
        result = bml.launch(
            train,
            FABRIC,
            address=head,
            transport="verbs",
            detect_s=DETECT_S,
            start_s=START_S,
            faults=[f"kill:{VICTIM}@step={KILL_STEP}"],
        )
        ended_s = result.values[CUT[0]]["ended_s"]
        print(f"job: the first step began after {ended_s[0] - began_s:.0f} s")
        print(f"job: steps took {np.diff(ended_s).round(1).tolist()} s")
        print(f"job: it ended {time.time() - ended_s[-1]:.0f} s later")
    for view in result.report["views"]:
        print(f"job: view {view['epoch']} from {view['at_s']} s: {view['reason']}")
    return result


def test_survivors_have_the_sum_of_one_process_and_used_every_sample_once(result: bml.Result) -> None:
    assert sorted(result.values) == [server for server in range(SERVERS) if server != VICTIM]
    assert {value["wrong"] for value in result.values.values()} == {0}
    assert len(set(result.report["digests"].values())) == 1
    assert len(result.report["digests"]) == SERVERS - 1
    assert result.report["samples"]["complete"]
    assert result.report["steps"] == STEPS


def test_the_nic_and_the_server_were_lost_and_nothing_else(result: bml.Result) -> None:
    views = result.report["views"]
    assert views[0]["failures"] == []
    assert {f"link:{CUT[0]}/{CUT[1]}"} == {each for view in views[:-1] for each in view["failures"]}
    assert f"server:{VICTIM}" in views[-1]["failures"]
    assert [len(view["members"]) for view in views] == [SERVERS] * (len(views) - 1) + [SERVERS - 1]
    assert "its process is gone" in result.report["dead"][VICTIM]


def test_rdma_carried_the_bytes_on_every_nic_but_the_one_without_a_cable(result: bml.Result) -> None:
    for server, value in result.values.items():
        assert value["transport"]["name"] == "verbs"
        assert value["transport"]["fallback"] == ""
        devices = [each.split(" port")[0] for each in value["transport"]["devices"]]
        assert devices == [f"rxe{server}_{level}" for level in range(LEVELS)]
        sent = np.diff(value["sent"], axis=0)
        print(f"server {server}: bytes a step and NIC {sent.tolist()}")
        least = SIZE * 4 // SERVERS
        assert (sent[: CUT_STEP - 1] > least).all(), "both NICs of every server carry the sums"
    after_cut = np.array(result.values[CUT[0]]["sent"])[CUT_STEP:, CUT[1]]
    assert (after_cut == after_cut[0]).all(), "nothing goes by a NIC without a cable"
    nbytes = np.diff(result.values[CUT[0]]["sent"], axis=0)[CUT_STEP:, 1 - CUT[1]]
    assert (nbytes > 0).all(), "its other NIC carries on"
