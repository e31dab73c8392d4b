"""The decisions of `bml torchrun`: environment, restarts, exit status, faults, lines, nodes."""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bml.cli.torchrun import _meeting, _n_nodes, own_words, torchrun
from bml.cluster.process import agent
from bml.cluster.process.starting import Helper, start_agent
from bml.cluster.torchrun import launcher
from bml.cluster.torchrun.launcher import Request, _Launcher
from bml.cluster.torchrun.layout import Layout, command_of, read_endpoint, threads_of
from bml.cluster.torchrun.lines import LONGEST_NBYTES, Lines
from bml.cluster.torchrun.nodes import GONE_S, Heartbeats, NodeRecord, mismatch
from bml.cluster.torchrun.output import Pipe
from bml.cluster.torchrun.processes import listen
from bml.cluster.torchrun.ranks import Ranks
from bml.cluster.torchrun.store import Wanted, _Node, _Refused
from bml.cluster.torchrun.strikes import Strikes, strikes_of
from bml.errors import FabricError, StartError, UsageError

# --- environment and command ---------------------------------------------------------------------


def test_ranks_of_nodes_of_different_sizes_are_counted_through() -> None:
    layouts = [Layout((2, 3, 1), node, "job", ("10.0.0.1", 29500), 2) for node in range(3)]
    assert [list(each.ranks) for each in layouts] == [[0, 1], [2, 3, 4], [5]]
    found = layouts[1].environment(3, restarts=1, threads=4)
    assert found == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "4",
    }


def test_only_the_restart_count_differs_between_incarnations() -> None:
    layout = Layout((2,), 0, "job", ("127.0.0.1", 1), 3)
    first, second = (set(layout.environment(1, count, None).items()) for count in (0, 1))
    assert {key for key, _ in first ^ second} == {"TORCHELASTIC_RESTART_COUNT"}


@pytest.mark.parametrize(
    ("cores", "ranks", "environment", "threads"),
    [
        (8, 2, {}, 4),
        (8, 3, {}, 2),
        (2, 4, {}, 1),
        (8, 1, {}, None),
        (8, 2, {"OMP_NUM_THREADS": "3"}, None),
        (8, 2, {"OMP_NUM_THREADS": ""}, 4),
    ],
)
def test_cores_are_divided(cores: int, ranks: int, environment: dict[str, str], threads: int | None) -> None:
    assert threads_of(cores, ranks, environment) == threads


def test_commands() -> None:
    assert command_of("a.py", ["-x"], "python") == ["python", "-u", "a.py", "-x"]
    assert command_of("a.b", ["-x"], "python", module=True) == ["python", "-u", "-m", "a.b", "-x"]
    assert command_of("prog", ["-x"], "python", no_python=True) == ["prog", "-x"]
    with pytest.raises(UsageError, match="do not go together"):
        command_of("prog", [], "python", module=True, no_python=True)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("a:1", ("a", 1)),
        ("a", ("a", 7)),
        ("[::1]:80", ("::1", 80)),
        ("[::1]", ("::1", 7)),
        ("::1", ("::1", 7)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert read_endpoint(text, 7) == endpoint


@pytest.mark.parametrize("text", ["", ":1", "a:b", "a:70000", "[::1", "[::1]80", "a:²"])
def test_bad_endpoints(text: str) -> None:
    with pytest.raises(UsageError, match="is no endpoint"):
        read_endpoint(text, 7)


# --- options -------------------------------------------------------------------------------------

NONE = {
    "node_rank": None,
    "rdzv_endpoint": None,
    "rdzv_backend": "static",
    "rdzv_id": "none",
    "master_addr": None,
    "master_port": None,
    "standalone": False,
}


def test_where_nodes_meet() -> None:
    assert _meeting(1, **NONE)["endpoint"] == ("127.0.0.1", 0)
    assert _meeting(1, **NONE)["node"] == 0
    two = _meeting(2, **{**NONE, "rdzv_endpoint": "host"})
    assert (two["endpoint"], two["node"], two["n_nodes"]) == (("host", 29500), None, 2)
    two = _meeting(2, **{**NONE, "master_addr": "host", "master_port": 5, "node_rank": 1})
    assert (two["endpoint"], two["node"]) == (("host", 5), 1)
    assert _meeting(1, **{**NONE, "standalone": True, "rdzv_endpoint": "far:1"}).keys() == {"run_id"}


@pytest.mark.parametrize(
    ("n_nodes", "options", "says"),
    [
        (2, {}, "need --rdzv-endpoint"),
        (2, {"standalone": True}, "one node"),
        (2, {"node_rank": 2, "master_addr": "a"}, "0 to 1"),
        (2, {"rdzv_endpoint": "a:0"}, "must know the port"),
    ],
)
def test_meetings_that_cannot_be(n_nodes: int, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        _meeting(n_nodes, **{**NONE, **options})  # type: ignore[arg-type]


def test_numbers_of_nodes() -> None:
    assert [_n_nodes(text) for text in ("1", "2:2", "3")] == [1, 2, 3]
    for text in ("1:4", "0", "x", "-1", ""):
        with pytest.raises(UsageError, match="--nnodes"):
            _n_nodes(text)


@pytest.mark.parametrize(
    ("words", "n_own"),
    [
        ("torchrun train.py --json", 1),
        ("torchrun --json train.py", 2),
        ("torchrun --nproc-per-node 2 -m train --json", 4),
        ("torchrun --nproc_per_node=2 train.py --help", 2),
        ("torchrun -- train.py --json", 1),
        ("run train.py --json", 3),
        ("torchrun --nproc-per-node", 2),
    ],
)
def test_options_of_the_script_are_not_the_launchers(words: str, n_own: int) -> None:
    assert list(own_words(words.split())) == words.split()[:n_own]


def test_the_guide_names_the_flags_of_torchrun_that_are_missing() -> None:
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    ours = {option for parameter in torchrun.params for option in parameter.opts} | {"--help"}
    flags = [action.option_strings for action in parser._actions if action.option_strings]
    missing = [each for each in flags if not ours & set(each)]
    guide = (Path(__file__).parents[2] / "docs/guides/torchrun.md").read_text()
    assert missing
    for each in missing:
        assert any(f"`{name}`" in guide for name in each), each


# --- ends of ranks -------------------------------------------------------------------------------


class _Helper:
    """The launcher's side of a helper that sends these messages, and has ended after them."""

    sock: Any = None
    send: Any = None

    def __init__(self, *messages: Any):
        self._messages = [*messages, None]

    def receive(self) -> Any:
        return self._messages.pop(0)


def _launcher(ranks: Ranks, said: list[str], store: _Helper, agent: _Helper) -> Any:
    made: Any = object.__new__(_Launcher)
    made._request, made._say, made._ranks, made._met = Request(["train"], 2), said.append, ranks, True
    made._store, made._agent, made._pipes = store, agent, {0: [], 1: []}
    made._selector = SimpleNamespace(unregister=lambda sock: None)
    return made


def test_a_rank_that_cannot_be_started_again_ends_no_other() -> None:
    ranks, said = Ranks(range(2), 1), list[str]()
    assert ranks.ended(1, -9)
    cannot = {"is": "cannot", "name": 1, "why": "Resource temporarily unavailable"}
    _launcher(ranks, said, _Helper(), _Helper(cannot))._heard_of_agent()
    assert said == [
        "rank 1, which died (signal 9), cannot be started again: Resource temporarily unavailable"
    ]
    assert ranks.running == [0]
    assert not ranks.ended(0, 0)
    assert (ranks.status(), ranks.line()) == (0, "rank 1 died (signal 9), 1 rank finished")
    assert ranks.summary()["1"] == {"end": "died", "code": -9, "restarts": 0}


def test_a_rank_that_cannot_be_started_at_all_is_an_error() -> None:
    cannot = {"is": "cannot", "name": 1, "why": "Permission denied"}
    with pytest.raises(StartError, match="train cannot be run: Permission denied"):
        _launcher(Ranks(range(2), 1), [], _Helper(), _Helper(cannot))._heard_of_agent()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([], "the process that holds the store was killed"),
        ([{"is": "lost"}], "node 0, which holds the store, is gone"),
        ([{"is": "failed", "why": "no memory"}], "the store cannot be used: no memory"),
    ],
)
def test_the_end_of_the_store_is_said_once(message: list[Any], why: str) -> None:
    for n_running in (1, 0):
        ranks, said = Ranks(range(n_running), 1), list[str]()
        made = _launcher(ranks, said, _Helper(*message), _Helper())
        while made._store is not None:
            made._heard_of_store()
        assert said == [why + ": the ranks go on, and none can be started again" * n_running]


def test_a_node_0_that_is_silent_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine is off, and the process that holds its store never answers."""
    monkeypatch.setattr(launcher, "GONE_S", 0.05)
    ranks, said = Ranks(range(2, 3), 0), list[str]()
    assert not ranks.ended(2, 0)
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector() as selector:
        store = _Helper()
        store.sock = ours
        made = _launcher(ranks, said, store, _Helper())
        made._request, made._selector = Request(["train"], 1, 2), selector
        made._layout, made._strikes = Layout((2, 1), 1, "job", ("10.0.0.1", 29500)), Strikes([], [])
        selector.register(ours, selectors.EVENT_READ)
        assert made.leave().status == 0
        assert theirs.recv(10) == b"done"
    assert said == ["node 0, which holds the store, does not answer"]


@pytest.mark.slow
def test_the_last_words_of_ranks_are_shown_whose_parent_was_killed() -> None:
    """The end of the parent is seen before the ranks have ended, and before their pipes are empty."""
    shown, n_lines = list[bytes](), 20_000
    pipes = [Pipe(0, 1, lambda number, lines: shown.append(lines)) for _ in range(2)]

    def write() -> None:
        with os.fdopen(pipes[0].writes, "wb") as out:
            out.writelines(b"line %d\n" % number for number in range(n_lines))
            out.write(b"last words")

    def gone() -> Any:
        raise FabricError("the parent of the ranks was killed")

    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, selectors.DefaultSelector() as selector:
        made = _launcher(Ranks(range(1), 0), [], _Helper(), _Helper())
        made._selector, made._heard_of_agent = selector, gone
        made._agent.send = lambda message: None
        selector.register(ours, selectors.EVENT_READ)
        for pipe in pipes:
            selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        writing = threading.Thread(target=write)
        writing.start()
        made.interrupt()
        made._close_pipes()
        writing.join()
        pipes[1].given()
    lines = b"".join(shown).splitlines()
    assert lines[-1] == b"[rank 0] last words"
    assert len(lines) == n_lines + 1


def test_a_death_that_others_outlive_is_survived() -> None:
    ranks = Ranks(range(4), 0)
    assert not ranks.ended(2, -9)
    assert ranks.running == [0, 1, 3]
    for rank in (0, 1, 3):
        assert not ranks.ended(rank, 0)
    assert (ranks.running, ranks.status()) == ([], 0)
    assert ranks.line() == "rank 2 died (signal 9), 3 ranks finished"


def test_the_first_end_that_nobody_survived_is_the_status() -> None:
    ranks = Ranks(range(3), 0)
    ranks.ended(1, -9)
    ranks.ended(0, 5)
    ranks.ended(2, 1)
    assert ranks.status() == 137
    assert ranks.line().endswith("rank 2 failed (exit status 1), no ranks finished")


def test_an_end_after_the_last_rank_that_finished_is_not_survived() -> None:
    ranks = Ranks(range(4), 0)
    for rank, code in ((3, -9), (0, 0), (1, 7), (2, 6)):
        ranks.ended(rank, code)
    assert ranks.status() == 7


def test_restarts_are_counted_for_each_rank() -> None:
    ranks = Ranks(range(3), 2)
    assert [ranks.ended(1, -9), ranks.ended(1, 1), ranks.ended(1, -9)] == [True, True, False]
    assert ranks.ended(2, 1)
    assert ranks.running == [0, 2]
    assert (ranks.restarts(1), ranks.restarts(2)) == (2, 1)
    ranks.ended(2, 0)
    ranks.ended(0, 0)
    assert ranks.status() == 0
    said = "rank 1 died (signal 9), rank 2 failed (exit status 1) and was started again, 2 ranks finished"
    assert ranks.line() == said


def test_no_restart_when_one_has_finished_or_the_job_is_ended() -> None:
    ranks = Ranks(range(2), 9)
    ranks.ended(0, 0)
    assert not ranks.ended(1, -9)
    stopped = Ranks(range(2), 9)
    stopped.stop()
    assert not stopped.ended(1, -9)
    assert Ranks(range(1), 9).ended(0, 1), "a job of one rank is started again"


@pytest.mark.parametrize("seed", range(20))
def test_the_status_is_by_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    ends = [(rank, rng.choice((0, 0, 1, 3, -9, -15))) for rank in rng.sample(range(6), 6)]
    ranks = Ranks(range(6), 0)
    for rank, code in ends:
        ranks.ended(rank, code)
    codes = [code for _, code in ends]
    not_survived = [code for at, code in enumerate(codes) if code and 0 not in codes[at:]]
    first = not_survived[0] if not_survived else 0
    assert ranks.status() == (first if first >= 0 else 128 - first)


# --- faults --------------------------------------------------------------------------------------


def test_faults_strike_in_the_order_of_time() -> None:
    strikes = Strikes(strikes_of(["kill:1@t=3s", "freeze:0@t=1s,for=4s"], 4), range(2))
    assert strikes.wait_s(0.25) == 0.75
    assert [each.act for each in strikes.due(1.0, [0, 1])] == ["freeze"]
    assert [each.rank for each in strikes.due(3.5, [0, 1])] == [1]
    strikes.ended(1)
    assert [each.act for each in strikes.due(5.0, [0])] == ["thaw"]
    assert (strikes.wait_s(9.0), strikes.rest()) == (None, [])


def test_only_ranks_of_this_node_are_struck() -> None:
    strikes = Strikes(strikes_of(["kill:1@t=1s", "kill:2@t=1s"], 4), range(2, 4))
    assert [each.rank for each in strikes.due(2.0, [2, 3])] == [2]


def test_faults_that_never_struck_are_known() -> None:
    strikes = Strikes(strikes_of(["kill:0@t=1s", "kill:1@t=9s"], 2), range(2))
    assert strikes.due(2.0, [1]) == []
    assert strikes.rest() == ["kill:0@t=1s", "kill:1@t=9s"]


def test_ranks_that_nothing_lets_go_are_known_when_no_other_runs() -> None:
    strikes = Strikes(strikes_of(["freeze:0@t=1s", "freeze:1@t=1s,for=5s"], 3), range(3))
    strikes.due(2.0, [0, 1, 2])
    assert strikes.for_good([0, 2]) == strikes.for_good([0, 1]) == []
    assert strikes.for_good([0]) == [0]
    strikes.ended(0)  # it was killed and started again
    assert strikes.for_good([0]) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cut:1/0@t=1s", "no fault of a process"),
        ("coordinator@t=1s", "no fault of a process"),
        ("freeze:coordinator@t=1s", "no fault of a process"),
        ("exit:1@t=1s", "no fault of a process"),
        ("kill:1@step=3", "needs a time"),
        ("kill:4@t=1s", "ranks are 0 to 3"),
        ("kill 1", "is not a fault"),
    ],
)
def test_faults_that_cannot_be(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        strikes_of([text], 4)


# --- lines ---------------------------------------------------------------------------------------


def test_lines_have_the_rank_before_them() -> None:
    lines = Lines("> ")
    assert lines.take(b"one\ntw") == b"> one\n"
    assert lines.take(b"o\n\nthree") == b"> two\n> \n"
    assert lines.end() == b"> three\n"
    assert lines.end() == b""


def test_progress_bars_keep_their_carriage_returns() -> None:
    lines = Lines("> ")
    assert lines.take(b"\r10%\r20%") == b"> \r> 10%\r"
    assert lines.take(b"\r") == b"", "a line feed may follow"
    assert lines.take(b"\ndone\r\n") == b"> 20%\r\n> done\r\n"


@pytest.mark.parametrize("seed", range(10))
def test_lines_do_not_depend_on_how_they_come(seed: int) -> None:
    rng = random.Random(seed)
    text = b"".join(rng.choice((b"a", b"bc", b"\n", b"\r", b"\r\n")) for _ in range(200)) + b"end"
    whole = Lines("> ")
    wanted = whole.take(text) + whole.end()
    pieces, found = Lines("> "), b""
    while text:
        n = rng.randint(1, 5)
        found, text = found + pieces.take(text[:n]), text[n:]
    assert found + pieces.end() == wanted


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    lines = Lines("> ")
    shown = b"".join(lines.take(b"x" * 1000) for _ in range(1000)) + lines.end()
    assert shown.count(b"x") == 1_000_000
    assert max(map(len, shown.split(b"\n"))) <= LONGEST_NBYTES + 2


# --- nodes ---------------------------------------------------------------------------------------


def test_nodes_of_another_job_are_refused() -> None:
    record = NodeRecord("job", 2, 4, "a")
    assert mismatch(1, record, NodeRecord("job", 2, 3, "b")) == ""
    assert "--rdzv-id other" in mismatch(1, record, NodeRecord("other", 2, 4, "b"))
    assert "--nnodes 3" in mismatch(1, record, NodeRecord("job", 3, 4, "b"))


def test_a_node_whose_number_stands_still_is_gone() -> None:
    heartbeats = Heartbeats()
    assert heartbeats.gone({1: 5, 2: 5}, 100.0) == []
    assert not heartbeats.moved
    assert heartbeats.gone({1: 5, 2: 6}, 100.0 + GONE_S - 1) == []
    assert heartbeats.moved
    assert heartbeats.gone({1: 5, 2: 6}, 100.0 + GONE_S) == [1]
    assert heartbeats.gone({1: 6, 2: 6}, 100.0 + GONE_S + 1) == []


@pytest.mark.parametrize(
    ("host", "n_nodes", "at"),
    [
        ("node0", 2, "0.0.0.0"),
        ("node0", 1, "127.0.0.1"),
        ("localhost", 2, "127.0.0.1"),
        ("127.0.0.1", 2, "127.0.0.1"),
    ],
)
def test_a_name_that_is_a_loopback_address_on_its_own_machine_is_listened_at_everywhere(
    host: str, n_nodes: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known(name: str, port: int, **_: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    first = listen(host, 0, None, n_nodes)
    assert first is not None
    with first:
        address, port = first.getsockname()
        assert address == at
        assert listen(host, port, None, n_nodes) is None, "another node of this machine is 0"


def test_a_node_too_many_is_told_how_to_replace_one() -> None:
    store = SimpleNamespace(add=lambda key, amount: 2)
    nobody: Any = None
    with pytest.raises(_Refused, match="give the --node-rank of the node that it replaces"):
        _Node(store, Wanted("a", 1, None, None, 2, 1, "j"), nobody, print)


def test_an_environment_that_is_too_long_is_said_and_nothing_waits() -> None:
    helper = Helper.__new__(Helper)
    helper.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with helper.sock, other:
        helper.send({"do": "start", "environment": {"WIDE": "x" * 100_000}})
        assert json.loads(other.recv(agent.MOST_NBYTES))["environment"]["WIDE"] == "x" * 100_000
        with pytest.raises(FabricError, match=r"environment take 2000.. bytes, 131072 are possible"):
            helper.send({"do": "start", "environment": {"WIDE": "x" * 200_000}})


def test_a_launcher_that_starts_many_before_it_reads_is_not_waited_for() -> None:
    """With 300 unread answers the sockets are full."""
    n, helper = 600, start_agent(os.environ)
    try:
        with open(os.devnull, "wb") as nowhere:
            for name in range(n):
                start = {"do": "start", "name": name, "command": ["/nothing/there", "x" * 500]}
                helper.send({**start, "environment": {}}, [nowhere.fileno()] * 2)
        answers = [helper.receive() for _ in range(n)]
        assert [each and each["name"] for each in answers] == list(range(n))
        assert {each and each["why"] for each in answers} == {"No such file or directory"}
    finally:
        helper.hang_up()


def test_a_grace_of_months_kills_nobody() -> None:
    helper = start_agent(os.environ)
    try:
        with open(os.devnull, "wb") as nowhere:
            start = {"do": "start", "name": 0, "command": ["sleep", "600"], "environment": {}}
            helper.send(start, [nowhere.fileno()] * 2)
        helper.send({"do": "end", "grace_s": 1e7})
        assert helper.receive() == {"is": "ended", "name": 0, "code": -15}
        assert helper.process.wait(30) == 0
    finally:
        helper.hang_up()


@pytest.mark.parametrize("text", ["data/*.tar", "ü é 数", os.fsdecode(b"\xff\xfe")])
def test_any_text_of_an_environment_comes_out_as_it_was(text: str) -> None:
    assert agent.read(agent.packet({"environment": {"X": text}})) == {"environment": {"X": text}}
