"""Groups that others put together anew: PyTorch's interface for fault tolerance."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from forked_ranks import run_group  # noqa: E402

from bml.errors import StartError  # noqa: E402
from bml.topology.errors import UsageError  # noqa: E402
from bml.torch.handles import Handle, Uses, fabric_of, new_handle, place  # noqa: E402
from bml.torch.steps import GroupSteps  # noqa: E402

ALL = [0, 1, 2, 3]
PLANS: dict[str, list[dict[str, Any]]] = {
    "late, alone, merged, in another order, the same, in any order, after abort": [
        {"groups": [[0, 1, 2]]},
        {"groups": [ALL]},
        {"groups": [[0], [1], [2], [3]]},
        {"groups": [[0, 1], [3, 2]]},
        {"groups": [[3, 0, 2, 1]]},
        {"groups": [[3, 0, 2, 1]]},
        {"groups": [ALL], "unordered": True},
        {"groups": [ALL], "aborts": True},
    ],
    "without the middle, the last, the first": [
        {"groups": [ALL]},
        {"groups": [[0, 2, 3]], "killed": [1]},
        {"groups": [[0, 2]], "killed": [3]},
        {"groups": [[2]], "killed": [0]},
    ],
    "beside the repair of bml": [{"groups": [ALL], "lost": 2}, {"groups": [[3, 1, 0]]}],
}


def expected(stage: dict[str, Any], group: list[int], me: int) -> list[dict[str, Any]]:
    total = sum(1 << each for each in group)
    seen = [{"rank": group.index(me), "size": len(group), "sum": total, "first": group[0]}]
    if (lost := stage.get("lost")) in group:
        left = [rank for rank, each in enumerate(group) if each != lost]
        seen.append({"contributors": left, "sum": total - (1 << lost)})
    return seen


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", PLANS)
def test_processes_are_put_into_groups(name: str, tmp_path: Path) -> None:
    stages, orders = PLANS[name], list[tuple[int, int]]()
    killed = {each for stage in stages for each in [*stage.get("killed", []), stage.get("lost")]}
    for me, end in enumerate(run_group(4, "reconfigured", folder=str(tmp_path), stages=stages)):
        if me in killed:
            assert end == -signal.SIGKILL
            continue
        *seen, refused = end
        wanted = []
        for stage in stages:
            for group in stage["groups"]:
                if me not in group:
                    continue
                if stage.get("unordered"):  # any order will do
                    chosen = {key: seen[len(wanted)][key] for key in ("rank", "first")}
                    wanted.append({"size": len(group), "sum": sum(1 << each for each in group)} | chosen)
                    orders.append((chosen["rank"], chosen["first"]))
                else:
                    wanted += expected(stage, group, me)
        assert seen == wanted
        used, foreign, absent, unreachable, unformed = refused
        assert used.startswith("RuntimeError: the uuid")
        assert "already used" in used
        assert foreign.startswith("UsageError: 'gloo' is no handle")
        assert absent == "NotFormed: the group cannot be formed: rank 1 did not appear in time (start_s)"
        assert unreachable.startswith("NotFormed: the process of rank 0 does not answer at 127.0.0.1:1")
        assert unformed.startswith("UsageError: the group is not formed: exchange the handles")
    assert sorted(rank for rank, _ in orders) == list(range(len(orders))), "a rank each"
    assert len({first for _, first in orders}) <= 1


@pytest.mark.parametrize("seed", range(50))
def test_all_processes_find_the_same_ranks(seed: int) -> None:
    rng = random.Random(seed)
    handles = [new_handle(f"10.0.0.{number}", rng.randrange(1, 1 << 16)) for number in range(9)]
    members = rng.sample(handles, rng.randint(1, 9))
    texts = [each.encode() for each in members]
    for rank, each in enumerate(members):
        found = place(each, texts)
        assert found[:3] == (rank, len(members), members[0])
        assert found.digest == place(members[0], texts).digest
        assert len(members) == 1 or found.digest != place(each, texts[::-1]).digest
    places = [place(each, set(texts)) for each in members]
    assert sorted(found.rank for found in places) == list(range(len(members)))
    assert len({found.first for found in places}) == 1


def test_handles_that_make_no_group_are_refused() -> None:
    own, other = new_handle("127.0.0.1", 1), new_handle("127.0.0.1", 2)
    for handles, said in (
        ([other.encode()], "not those of this process"),
        ([], "not those of this process"),
        ([own.encode(), other.encode(), other.encode()], "1 of 3 handles are there twice"),
        ([own.encode(), "bml:{}"], "is no handle of backend bml"),
        ([own.encode(), "127.0.0.1:80"], "is no handle of backend bml"),
    ):
        with pytest.raises(UsageError, match=said):
            place(own, handles)


def test_a_number_is_used_once() -> None:
    uses = Uses()
    uses.use(7)
    uses.use(8)
    with pytest.raises(RuntimeError, match="already used"):
        uses.use(7)


def test_the_named_fabric_is_for_groups_of_its_size() -> None:
    environ = {"BML_FABRIC": "bcube:2x2"}
    assert fabric_of(4, environ) is None
    assert fabric_of(3, environ) == "switch:3"
    assert fabric_of(3, {}) is None


def test_a_handle_is_a_string_that_comes_back() -> None:
    own = Handle("a", "::1", 29500)
    assert place(own, [own.encode()]).first == own


def failure(group: Any, uuid: int, handles: list[str], limit_s: float = 60.0) -> Exception:
    """The error of a group that is not formed."""
    work = group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timedelta(seconds=limit_s)))
    with pytest.raises(RuntimeError) as raised:
        work.wait()
    assert isinstance(raised.value, StartError)
    return raised.value


@pytest.mark.timeout(60)
def test_processes_that_were_given_different_handles_are_told_at_once() -> None:
    from bml.torch.reconfigurable import ReconfigurableGroup

    groups = [ReconfigurableGroup(rank, 3) for rank in range(3)]
    zero, one, two = (each.get_reconfigure_handle() for each in groups)
    found = dict[int, Exception]()

    def joins(me: int, handles: list[str]) -> None:
        found[me] = failure(groups[me], 5, handles)

    first = threading.Thread(target=joins, args=(0, [zero, one, two]))
    first.start()
    joins(1, [zero, two, one])
    first.join(30)
    joins(2, [zero, two, one])
    assert sorted(found) == [0, 1, 2], "none has waited for its time-out of 60 s"
    for error in found.values():
        assert "given different handles for this uuid" in str(error)
    for each in groups:
        each.abort()


@pytest.mark.timeout(60)
def test_a_rank_0_that_has_ended_is_noticed_at_once() -> None:
    from bml.torch.reconfigurable import ReconfigurableGroup

    with socket.create_server(("127.0.0.1", 0)) as ended:
        gone = new_handle(*ended.getsockname()).encode()
    group = ReconfigurableGroup(0, 1)
    error = failure(group, 1, [gone, group.get_reconfigure_handle()], limit_s=300)
    assert "the process of rank 0 does not answer" in str(error)
    assert "refused" in str(error)
    group.abort()


def test_the_keys_of_a_group_go_when_the_next_one_is_formed() -> None:
    from bml.torch.reconfigurable import ReconfigurableGroup

    group = ReconfigurableGroup(0, 1)
    handles = [group.get_reconfigure_handle(), new_handle("127.0.0.1", 1).encode()]
    held = []
    for uuid in range(3):
        assert "rank 1 did not appear" in str(failure(group, uuid, handles, limit_s=0.2))
        held.append(group._meeting.num_keys())
    assert held == held[:1] * 3
    group.abort()


class OtherSteps:
    """Steps that carry out nothing."""

    is_alone = False

    def carry_out(self, job: Callable[[Any], object]) -> None:
        """Call it."""
        job(self)

    def tell_losses(self) -> None:
        """Nobody is lost."""


def test_what_was_begun_in_one_group_is_not_carried_out_in_the_next_one() -> None:
    from bml.torch.reconfigurable import ReconfigurableGroup

    group = ReconfigurableGroup(0, 1)
    with pytest.raises(UsageError, match="the group is not formed"):
        group.begin("barrier", [], lambda steps: None)
    first, second = OtherSteps(), OtherSteps()
    let_go, used = threading.Event(), list[object]()
    group._steps = first
    held = group.begin("barrier", [], lambda steps: let_go.wait(20))
    later = group.begin("barrier", [], used.append)
    group._steps = second
    let_go.set()
    assert held.wait()
    assert later.wait()
    assert used == [first]
    group.abort()


class FormedGroup:
    """A group that was formed; it notes how it was left."""

    def __init__(self) -> None:
        self.server = SimpleNamespace(servers=(0,), joins=False)
        self.closed: list[str] = []

    def begin_close(self, outcome: str) -> None:
        self.closed.append(outcome)


@pytest.mark.parametrize("moment", ["while it is formed", "when it has been formed"])
def test_a_group_that_is_left_while_it_is_formed_is_closed(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bml.torch import reconfigurable

    formed, aborting = FormedGroup(), list[threading.Thread]()
    group = reconfigurable.ReconfigurableGroup(0, 1)

    def abort() -> None:
        aborting.append(threading.Thread(target=group.abort))
        aborting[0].start()
        aborting[0].join(0.3)

    def form(*_: Any) -> FormedGroup:
        if moment == "while it is formed":
            abort()
        return formed

    def steps(*arguments: Any) -> Any:
        if moment == "when it has been formed":
            abort()
        return GroupSteps(*arguments)

    monkeypatch.setattr(reconfigurable, "form", form)
    monkeypatch.setattr(reconfigurable, "GroupSteps", steps)
    options = SimpleNamespace(uuid=1, handles=[group.get_reconfigure_handle()], timeout=None)
    work = group.reconfigure(options)
    if moment == "while it is formed":
        with pytest.raises(StartError, match="left before it was formed"):
            work.wait()
    else:
        work.wait()
    aborting[0].join(20)
    assert formed.closed == ["crashed"]
    with pytest.raises(UsageError, match="the group is not formed"):
        group.begin("barrier", [], lambda steps: None)


@pytest.mark.parametrize("nics", ["10.0.0.{n}", "10.0.0.1,10.1.0.1"])
def test_addresses_that_change_with_ranks_are_refused(nics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bml.torch.reconfigurable import ReconfigurableGroup

    monkeypatch.setenv("BML_NICS", nics)
    with pytest.raises(UsageError, match="give each process one address of its own"):
        ReconfigurableGroup(0, 2)
