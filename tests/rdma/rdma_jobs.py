"""Whole jobs over RDMA: every bit is right, whatever is cut, killed or lost."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import fork_the_server

import bml
from bml.cli import main
from bml.lab.bench import contenders
from bml.topology import parse

DETECT_S = 6.0


@pytest.fixture(autouse=True)
def fast_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_the_server(monkeypatch)


def digits_example(epochs: int) -> Any:
    """The example's module, with its data read here: every server would need seconds for it."""
    file = Path(__file__).parents[2] / "examples" / "train_digits.py"
    spec = importlib.util.spec_from_file_location("digits_over_rdma", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    digits = module.load()
    module.load = lambda: digits
    module.EPOCHS = epochs
    return module


@pytest.mark.parametrize(
    ("fabric", "servers", "epochs"),
    [pytest.param("bcube:2x2", 4, 6, marks=pytest.mark.smoke), ("bcube:3x2", 9, 3)],
)
def test_the_digits_are_learnt_as_by_one_process(fabric: str, servers: int, epochs: int) -> None:
    example = digits_example(epochs)
    alone = example.reference()
    result = launch(example.train, fabric)
    print(f"accuracy {result.value['accuracy']:.4f}, alone {alone.accuracy:.4f}")
    assert len(result.values) == servers
    assert len(set(result.report["digests"].values())) == 1
    assert result.report["samples"]["complete"]
    for each in result.values.values():
        assert each["accuracy"] == pytest.approx(alone.accuracy, abs=0.006)
        assert each["loss"] == pytest.approx(alone.loss, rel=1e-3)
    assert alone.accuracy > 0.9


@pytest.mark.parametrize("fabric", ["bcube:2x2", "bcube:3x2"])
def test_bench_and_status_show_what_is_used(fabric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_DETECT_S", DETECT_S)
    monkeypatch.setattr(contenders, "START_S", 150.0)
    said: list[dict[str, Any]] = []
    known = contenders.Own._transports

    def transports(own: contenders.Own) -> dict[int, dict[str, Any]]:
        said.append(known(own))
        return dict(said[-1])

    monkeypatch.setattr(contenders.Own, "_transports", transports)
    options = ["--fabric", fabric, "--sizes", "1MiB", "--repetitions", "1", "--block-s", "0.1"]
    result = CliRunner().invoke(main, ["bench", "allreduce", *options, "--transport", "verbs,tcp", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    (row,) = printed["rows"]
    copies = f"{row['copies_sent']:.4f} sent, {row['copies_received']:.4f} received"
    print(f"\n{row['median_s']:.3f} s a step; copies per byte: {copies}")
    assert printed["transport"] == "verbs"
    assert row["wrong"] == 0
    assert max(row["copies_sent"], row["copies_received"]) < 0.01
    answers = {server: each for answer in said for server, each in answer.items()}
    assert sorted(answers) == list(parse(fabric).servers)
    for server, each in answers.items():
        assert each["fallback"] == ""
        assert [text.split(" (")[0] for text in each["devices"]] == [
            f"rxe{server}_{rail} port 1, GID 1" for rail in range(2)
        ]
    doctor = CliRunner().invoke(main, ["doctor", "--json"])
    check = json.loads(doctor.stdout)["checks"]["verbs (RDMA)"]
    assert check["usable"], check
    assert "rxe0_0:1 0000:0000:0000:0000:0000:ffff:0a07:0001" in check["why"]


def launch(train: Any, fabric: str, **settings: Any) -> bml.Result:
    started_s = time.monotonic()
    result = bml.launch(
        train,
        fabric=fabric,
        launcher="processes",
        transport="verbs",
        detect_s=DETECT_S,
        start_s=150,
        **settings,
    )
    views = [(view["reason"], view["failures"]) for view in result.report["views"]]
    print(f"\n{fabric}: {time.monotonic() - started_s:.1f} s, views {views}")
    return result


@pytest.mark.parametrize("fabric", [pytest.param("bcube:2x2", marks=pytest.mark.smoke), "bcube:3x2"])
def test_all_reduce_is_exact_at_every_size_and_never_copied(fabric: str) -> None:
    sizes = [1, 2, 3, 1021, 4099, 65_537, 300_001, 1 << 20]

    def train(session: bml.Session) -> int:
        servers = len(session.view.members)
        wrong = 0
        for size in sizes:
            x = session.empty(size, "int32")
            x[:] = np.arange(size, dtype=np.int32) * (session.server + 1)
            expected = np.arange(size, dtype=np.int32) * (servers * (servers + 1) // 2)
            wrong += int((session.allreduce(x) != expected).sum())
        return wrong

    result = launch(train, fabric)
    assert len(result.values) == (4 if fabric == "bcube:2x2" else 9)
    assert set(result.values.values()) == {0}
    assert len(result.report["views"]) == 1
    links = [stats for each in result.report["metrics"].values() for stats in each["links"].values()]
    moved = sum(stats["nbytes_sent"] for stats in links)
    for side in ("sent", "received"):
        copied = sum(stats[f"nbytes_copied_{side}"] for stats in links)
        print(f"copies per byte {side}: {copied / moved:.4f} of {moved} bytes")
        assert copied / moved < 0.02, "only small frames are copied"


def steps(session: bml.Session, size: int, count: int, at: dict[int, Any]) -> list[list[int]]:
    """`count` steps over `size` elements; on server 0, `at[step]` happens just before the step."""
    seen = []
    x = session.empty(size, "float32")
    for step in range(1, count + 1):
        if session.server == 0 and step in at:
            at[step]()
        x[:] = np.arange(size) % 1000 + 2.0**session.server
        result = session.allreduce(x)
        whose = list(session.contributors)
        expected = (np.arange(size) % 1000) * len(whose) + sum(2.0**server for server in whose)
        assert (result == expected.astype(np.float32)).all(), f"step {step} with {whose}"
        seen.append(whose)
    return seen


def soon(*commands: str) -> Any:
    """Starts commands that run while the step does."""
    return lambda: subprocess.Popen(["sh", "-c", "sleep 0.1; " + "; ".join(commands)])


@pytest.mark.smoke
def test_a_cable_that_is_cut_in_mid_transfer_is_used_again_when_it_is_back() -> None:
    def train(session: bml.Session) -> int:
        cut = soon("ip link set ps1r0 down", "sleep 3", "ip link set ps1r0 up")
        steps(session, 100_000, 6, {3: cut})
        # Server 0 says when to stop: the number of steps must be the same everywhere.
        end_s = time.monotonic() + 60
        while True:
            back = session.view.epoch > 1 and not session.view.failures
            x = session.empty(20_000, "float32")
            x[:] = 100.0 if session.server == 0 and (back or time.monotonic() > end_s) else 1.0
            result = session.allreduce(x)
            assert (result == result[0]).all()
            if result[0] > 50:
                break
        nbytes = sum(each.nbytes_sent for (_, level), each in counters(session).items() if level == 0)
        steps(session, 100_000, 2, {})
        after = sum(each.nbytes_sent for (_, level), each in counters(session).items() if level == 0)
        return int(after - nbytes)

    result = launch(train, "bcube:2x2")
    failures = [view["failures"] for view in result.report["views"]]
    assert len(result.values) == 4, "no server was lost"
    assert failures[0] == failures[-1] == []
    assert set(map(tuple, failures[1:-1])) == {("link:1/0",)}
    assert result.values[1] > 100_000, "the NIC carries data again"


def counters(session: bml.Session) -> dict[tuple[int, int], Any]:
    return session._communicator._shell.opened.transport.stats()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.smoke
def test_a_server_that_is_killed() -> None:
    result = launch(lambda session: steps(session, 100_000, 6, {}), "bcube:2x2", faults=["kill:2@step=3"])
    for seen in result.values.values():
        assert seen == [[0, 1, 2, 3]] * 2 + [[0, 1, 3]] * 4


def test_a_server_that_loses_all_its_nics_is_out() -> None:
    cut = soon("ip link set ps3r0 down", "ip link set ps3r1 down")
    result = launch(lambda session: steps(session, 100_000, 6, {3: cut}), "bcube:2x2")
    assert sorted(result.values) == [0, 1, 2]
    assert all(seen[-1] == [0, 1, 2] for seen in result.values.values())


def test_loss_on_one_rail_evicts_no_server() -> None:
    subprocess.run(["tc", "qdisc", "add", "dev", "s1r0", "root", "netem", "loss", "2%"], check=True)
    try:
        result = launch(lambda session: steps(session, 100_000, 6, {}), "bcube:2x2")
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "s1r0", "root"], check=True)
    assert all(seen == [[0, 1, 2, 3]] * 6 for seen in result.values.values())
    assert len(result.report["views"]) == 1
