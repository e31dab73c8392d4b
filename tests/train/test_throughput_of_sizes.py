"""Steps, samples and time by the number of servers that contributed."""

from __future__ import annotations

from bml.train.balancing.throughput import Throughput, of_all


def test_each_step_counts_for_its_size_with_the_time_since_the_one_before() -> None:
    now = [10.0]
    throughput = Throughput(lambda: now[0])
    for size, step_s in [(6, 100.0), (6, 0.5), (6, 0.5), (9, 0.25), (9, 0.25), (6, 1.0)]:
        now[0] += step_s
        throughput.step(size)
        throughput.batch(size, 36)
    found = throughput.summary()
    assert list(found) == [6, 9]
    assert found[6] == {
        "steps": 4,
        "samples": 144,
        "seconds": 2.0,  # the first step is not timed
        "steps_per_s": 1.5,
        "samples_per_s": 54.0,
    }
    assert found[9] == {
        "steps": 2,
        "samples": 72,
        "seconds": 0.5,
        "steps_per_s": 4.0,
        "samples_per_s": 144.0,
    }


def test_a_size_without_a_timed_step_has_no_rate() -> None:
    throughput = Throughput(lambda: 1.0)
    assert throughput.summary() == {}
    throughput.step(3)
    assert throughput.summary()[3]["steps_per_s"] is None
    assert throughput.summary()[3]["samples_per_s"] is None


def test_goodput_is_relative_to_steps_in_which_no_view_changed() -> None:
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    assert throughput.goodput() is None

    def step(size: int, epoch: int, took_s: float) -> None:
        now[0] += took_s
        throughput.step(size, epoch)
        throughput.batch(size, 40)

    for _ in range(5):  # four are timed
        step(9, 1, 1.0)
    assert throughput.goodput() == 1.0
    step(8, 2, 4.0)  # the failure: it counts as time, not for the rate
    for _ in range(2):
        step(8, 2, 1.0)
    # 7 timed steps in 10 s, where 10 would have been committed without the failure.
    assert throughput.goodput() == 0.7
    assert throughput.n_samples == 8 * 40


def test_goodput_needs_samples() -> None:
    now = [0.0]
    throughput = Throughput(lambda: now[0])
    for _ in range(3):
        now[0] += 1.0
        throughput.step(4, 1)
    assert throughput.goodput() is None


def test_a_server_that_joins_counts_on_and_times_what_it_takes_part_in() -> None:
    now = [0.0]
    old, new = Throughput(lambda: now[0]), Throughput(lambda: now[0])

    def step(throughput: Throughput, size: int, took_part: bool = True) -> None:
        throughput.step(size, 1, took_part)
        throughput.batch(size, 36, took_part)

    for _ in range(4):
        now[0] += 1.0
        step(old, 8)
    new.go_on_from(old.counted())
    step(old, 8)
    step(new, 8, took_part=False)  # it is told of the step in which it had no part yet
    for _ in range(3):
        now[0] += 0.5
        step(old, 9)
        step(new, 9)
    assert old.counted() == new.counted() == [(8, 5, 180), (9, 3, 108)]
    assert (old.n_samples, new.n_samples) == (288, 108)
    assert new.summary()[8]["steps_per_s"] is None
    for servers in ([old, new], [new, old]):
        known = of_all(each.summary() for each in servers)
        assert [*known] == [8, 9]
        assert (known[8]["steps"], known[8]["seconds"]) == (5, 3.0)
        assert (known[9]["steps"], known[9]["seconds"]) == (3, 1.5), "old has timed one more than new"
