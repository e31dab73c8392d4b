"""Groups of real processes: sums, deaths, returns, and what is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import Ranks

pytestmark = pytest.mark.real

#: The longest time without a step after a death that a survivor may have, in seconds, on a busy machine:
#: it was 2.1 s where ten processes wanted two cores.
_RECOVERS_S = 30.0


@pytest.mark.smoke
def test_four_ranks_add_survive_a_death_and_leave_nothing_behind(tmp_path: Path) -> None:
    """The death of rank 0, and of the coordinator with it, is the hardest one."""
    with Ranks(tmp_path, 4, steps=400) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        killed_s = time.monotonic()
        ranks.processes[0].kill()
        for rank in (1, 2, 3):
            assert ranks.end(rank) == (0, "")
        gaps = [ranks.longest_gap_s(rank, killed_s) for rank in (1, 2, 3)]
        print(f"longest gap after the death of rank 0 and its coordinator: {max(gaps):.3f} s")
        assert max(gaps) < _RECOVERS_S
        ranks.check_sums()
        assert [ranks.said[rank][-2]["total"] for rank in (1, 2, 3)] == ranks.get(1, "total") * 3
        assert ranks.get(1, "by")[-1] == [1, 2, 3]
        ranks.check_nothing_left()


@pytest.mark.serial("closing waits for no fixed length of time")
def test_without_a_fault_all_contribute_to_every_step(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, steps=50) as ranks:
        ranks.start()
        for rank in range(4):
            assert ranks.end(rank) == (0, "")
            assert ranks.get(rank, "total") == [50 * 10.0]
            assert ranks.get(rank, "closed_s")[0] < 1.5  # no wait of a fixed length
        ranks.check_sums()
        ranks.check_nothing_left()


@pytest.mark.parametrize("victim", ["rank 3", "rank 1", "coordinator", "both lowest ranks", "all but 2"])
def test_survivors_go_on(tmp_path: Path, victim: str) -> None:
    with Ranks(tmp_path, 4, steps=800) as ranks:
        ranks.start()
        # A third rank prepares a process for a coordinator once there is a view.
        ranks.wait_for("step", n=200 if victim == "both lowest ranks" else 20)
        killed_s = time.monotonic()
        dead = {"rank 3": [3], "rank 1": [1], "both lowest ranks": [0, 1], "all but 2": [0, 1, 3]}.get(
            victim, []
        )
        if victim == "coordinator":
            os.kill(ranks.coordinator(0), signal.SIGKILL)
        for rank in dead:
            ranks.processes[rank].kill()
        left = [rank for rank in range(4) if rank not in dead]
        for rank in left:
            assert ranks.end(rank) == (0, "")
        gap_s = max(ranks.longest_gap_s(rank, killed_s) for rank in left)
        print(f"longest gap after the death of {victim}: {gap_s:.3f} s")
        assert gap_s < _RECOVERS_S
        ranks.check_sums()
        assert ranks.get(left[0], "by")[-1] == left
        ranks.check_nothing_left()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_was_started_again_contributes(tmp_path: Path, victim: int) -> None:
    with Ranks(tmp_path, 4, endless=True) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        ranks.processes[victim].kill()
        ranks.end(victim)
        before = len(ranks.get(victim, "step"))
        again_s = time.monotonic()
        ranks.start(victim)
        ranks.wait_until(lambda: len(ranks.get(victim, "step")) > before)
        print(f"rank {victim} contributes {time.monotonic() - again_s:.3f} s after its second start")
        assert time.monotonic() - again_s < 30
        ranks.stop_when_by(0, 1, 2, 3)
        for rank in range(4):
            assert ranks.end(rank) == (0, "")
        ranks.check_sums()
        assert ranks.get(victim, "formed") == [0, 1]
        assert ranks.get(1, "by")[-1] == [0, 1, 2, 3]
        assert len({ranks.get(rank, "total")[-1] for rank in range(4)}) == 1
        ranks.check_nothing_left()


def test_a_returned_rank_may_lead_and_die_again(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, endless=True) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        for _ in range(2):
            ranks.processes[0].kill()
            ranks.end(0)
            before = len(ranks.get(0, "step"))
            ranks.start(0)
            ranks.wait_until(lambda before=before: len(ranks.get(0, "step")) > before + 20)
            leading = [leads for rank in range(3) if (leads := ranks.get(rank, "leads")[-1])]
            os.kill(leading[0], signal.SIGKILL)
        ranks.stop_when_by(0, 1, 2)
        for rank in range(3):
            assert ranks.end(rank) == (0, "")
        assert ranks.get(0, "formed") == [0, 1, 2]
        assert ranks.get(1, "by")[-1] == [0, 1, 2]
        ranks.check_sums()
        ranks.check_nothing_left()


def test_a_rank_that_is_started_again_when_all_others_have_ended_says_so(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, steps=200) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        ranks.processes[2].kill()
        ranks.end(2)
        assert [ranks.end(rank) for rank in (0, 1)] == [(0, "")] * 2
        ranks.start(2)
        code, errors = ranks.end(2)
        assert code == 1
        assert "Evicted: server 2 was started again, and all others had ended before it was let in" in errors
        ranks.check_nothing_left()


def test_missing_ranks_are_named_in_time(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, settings={"start_s": 8.0}) as ranks:
        ranks.start(0, 2)
        for rank in (0, 2):
            code, errors = ranks.end(rank)
            assert (code, errors) == (3, "")
            assert "StartError" in ranks.get(rank, "error")[0]
            assert "ranks 1, 3 did not appear in time" in ranks.get(rank, "error")[0]
            assert 7.5 < ranks.get(rank, "took_s")[0] < 30
        ranks.check_nothing_left()


@pytest.mark.parametrize(("exits", "says"), [(False, "a mistake in the program"), (True, "gave up")])
def test_an_exception_ends_one_rank_and_the_others_go_on(tmp_path: Path, exits: bool, says: str) -> None:
    """It is told to the others, also if its rank has the coordinator; none of them closes its group."""
    with Ranks(tmp_path, 4, steps=200, raises={"0": 50}, exits=exits, closes=False) as ranks:
        ranks.start()
        code, errors = ranks.end(0)
        assert code == 1
        assert says in errors
        for rank in (1, 2, 3):
            assert ranks.end(rank) == (0, "")
        assert ranks.get(1, "by")[-1] == [1, 2, 3]
        ranks.check_sums()
        ranks.check_nothing_left()


def test_ctrl_c_ends_one_rank(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, steps=600) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        ranks.processes[2].send_signal(signal.SIGINT)
        code, errors = ranks.end(2)
        assert code == -signal.SIGINT
        assert "KeyboardInterrupt" in errors
        for rank in (0, 1):
            assert ranks.end(rank) == (0, "")
        ranks.check_sums()
        ranks.check_nothing_left()


def test_a_store_that_breaks_ends_nothing(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, steps=600, store_breaks=True) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        ranks.processes[0].kill()
        for rank in (1, 2):
            assert ranks.end(rank) == (0, "")
        assert ranks.get(1, "by")[-1] == [1, 2]
        ranks.check_sums()
        ranks.check_nothing_left()


@pytest.mark.serial("the death is noticed before silence would be")
def test_a_forked_child_holds_nothing_of_its_rank(tmp_path: Path) -> None:
    """As workers that load data are: the death of their rank is seen at once, though they live on."""
    with Ranks(tmp_path, 3, steps=200, forks=True) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        killed_s = time.monotonic()
        ranks.processes[0].kill()
        for rank in (1, 2):
            assert ranks.end(rank) == (0, "")
            assert ranks.longest_gap_s(rank, killed_s) < 0.6  # before its silence would be noticed
        os.kill(ranks.get(0, "child")[0], signal.SIGKILL)
        ranks.check_sums()
        ranks.check_nothing_left()


@pytest.mark.timeout(240)
def test_the_store_of_pytorch_may_die_with_rank_0(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    port = 20_000 + os.getpid() % 10_000  # below those that connections are given
    with Ranks(tmp_path, 4, endless=True, port=port, pause_s=0.05) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20, within_s=100)  # four processes import PyTorch
        ranks.processes[2].kill()
        ranks.end(2)
        ranks.start(2)
        ranks.wait_until(lambda: ranks.get(2, "formed") == [0, 1] and ranks.said[2][-1].get("step", 0) > 30)
        killed_s = time.monotonic()
        ranks.processes[0].kill()
        ranks.stop_when_by(1, 2, 3)
        for rank in (1, 2, 3):
            code, errors = ranks.end(rank)
            print(rank, errors)
            assert code == 0
            assert ranks.longest_gap_s(rank, killed_s) < _RECOVERS_S
        assert ranks.get(1, "by")[-1] == [1, 2, 3]
        ranks.check_sums()
        ranks.check_nothing_left()


def test_with_fewer_ranks_than_the_least_number_all_end(tmp_path: Path) -> None:
    with Ranks(tmp_path, 4, endless=True, settings={"min_servers": 3}) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        for rank in (0, 3):
            ranks.processes[rank].kill()
        for rank in (1, 2):
            code, errors = ranks.end(rank)
            assert code == 1
            assert "TooFewServers" in errors
            assert "min_servers is 3" in errors
        ranks.check_sums()
        ranks.check_nothing_left()


def test_frozen_ranks_do_not_go_on_beside_the_others(tmp_path: Path) -> None:
    """Rank 0 and its coordinator are frozen; when they wake, they are out."""
    with Ranks(tmp_path, 4, endless=True, pause_s=0.01) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        frozen_s = time.monotonic()
        processes = [ranks.processes[0].pid, ranks.coordinator(0)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        ranks.wait_until(lambda: ranks.said[1][-1].get("by") == [1, 2, 3])
        print(f"longest gap beside frozen processes: {ranks.longest_gap_s(1, frozen_s):.3f} s")
        for process in processes:
            os.kill(process, signal.SIGCONT)
        code, errors = ranks.end(0)
        assert code == 1
        assert "Evicted" in errors
        ranks.stop_when_by(1, 2, 3)
        for rank in (1, 2, 3):
            assert ranks.end(rank)[0] == 0
        assert ranks.get(1, "by")[-1] == [1, 2, 3]
        ranks.check_sums()
        ranks.check_nothing_left()


def test_a_rank_that_ends_early_is_named_to_the_others(tmp_path: Path) -> None:
    with Ranks(tmp_path, 3, steps=100, ends={"2": 50}) as ranks:
        ranks.start()
        for rank in (0, 1):
            code, errors = ranks.end(rank)
            assert code == 1
            assert "StepMismatch" in errors
            assert "server 2 returned after step" in errors
        assert ranks.end(2) == (0, "")
        ranks.check_nothing_left()


@pytest.mark.parametrize("fabric", ["bcube:2x2", "switch:4"])
def test_ranks_survive_over_tcp(tmp_path: Path, fabric: str) -> None:
    with Ranks(tmp_path, 4, steps=600, settings={"transport": "tcp", "fabric": fabric}) as ranks:
        ranks.start()
        ranks.wait_for("step", n=20)
        killed_s = time.monotonic()
        ranks.processes[0].kill()
        for rank in (1, 2, 3):
            assert ranks.end(rank) == (0, "")
            assert ranks.longest_gap_s(rank, killed_s) < _RECOVERS_S
        assert ranks.get(1, "by")[-1] == [1, 2, 3]
        ranks.check_sums()
        ranks.check_nothing_left()


@pytest.mark.serial("closing waits for no fixed length of time")
def test_a_rank_alone_is_a_group(tmp_path: Path) -> None:
    with Ranks(tmp_path, 1, steps=20) as ranks:
        ranks.start()
        assert ranks.end(0) == (0, "")
        assert ranks.get(0, "total") == [20.0]
        assert ranks.get(0, "closed_s")[0] < 1.5
        ranks.check_nothing_left()
