"""Paths in nested loops, and the way of a joiner to the path that it was given."""

from __future__ import annotations

import pytest

from bml.topology.errors import UsageError
from bml.train.position import Loop, Mark, Position

STEPS, EPOCH = "steps(9)", "batches(20, global_batch=4, epochs=1, seed=0)"


def enter(position: Position, plan: str = STEPS, length: int = 9) -> Loop:
    return position.enter(plan, length, lambda: None)


def go(position: Position, loop: Loop, *indices: int) -> list[int]:
    return [position.advance(loop, index) for index in indices]


def test_a_path_has_every_open_loop_and_counts_those_beside() -> None:
    position = Position()
    assert position.path == ()
    first = enter(position)
    go(position, first, 0, 1)
    position.leave(first)
    outer = enter(position)
    go(position, outer, 0)
    for _ in range(2):
        inner = enter(position, EPOCH, 5)
        go(position, inner, 0, 1, 2)
    assert position.path == (Mark(1, 0, STEPS), Mark(0, 2, EPOCH), Mark(0, 2, EPOCH))
    go(position, outer, 1)
    assert position.path == (Mark(1, 1, STEPS),), "the loops inside are left with their iteration"
    assert not inner.open
    inner = enter(position, EPOCH, 5)
    go(position, inner, 0)
    assert (inner.id, position.path[1].ordinal) == ((1, 1, 0), 0), "loops are counted anew in each iteration"


def test_places_differ_in_what_servers_compare() -> None:
    position, seen = Position(), [Position().described]
    loop = enter(position)
    for index in range(3):
        go(position, loop, index)
        seen.append(position.described)
    go(position, enter(position, EPOCH, 5), 0)
    seen.append(position.described)
    assert len({each.signature for each in seen}) == len({each.text for each in seen}) == 5
    assert seen[-1].text == f" in iteration 0 of {EPOCH} in iteration 2 of {STEPS}"


def test_a_loop_that_was_left_cannot_go_on() -> None:
    position, left = Position(), []
    outer = enter(position)
    go(position, outer, 0)
    inner = position.enter(EPOCH, 5, lambda: left.append(1))
    go(position, inner, 0)
    go(position, outer, 1)
    assert left == [1]
    with pytest.raises(UsageError, match="take turns, as in zip"):
        go(position, inner, 1)


def shares(position: Position, n_outer: int, *lengths: int) -> list[list[float]]:
    """Of each iteration of an outer loop with these loops after one another: what is said to be done."""
    outer, found = enter(position, length=n_outer), []
    for index in range(n_outer):
        go(position, outer, index)
        said = [position.done]
        for length in lengths:
            inner = enter(position, length=length)
            for step in range(length + 1):
                go(position, inner, step)
                said.append(position.done)
            position.leave(inner)
        found.append(said)
    go(position, outer, n_outer)
    return found


def test_of_loops_after_one_another_each_counts_by_its_length() -> None:
    """As training and validation; how many there are is known from the second iteration on."""
    first, *later = shares(Position(), 10, 100, 10)
    assert first[:102] == pytest.approx([0.0, *(step / 1000 for step in range(101))])
    assert first[102:] == pytest.approx([0.1] * 11), "it waits, and never falls"
    for index, said in enumerate(later, 1):
        steps = [0, *range(101), *range(100, 111)]
        assert said == pytest.approx([(index + step / 110) / 10 for step in steps])


def test_loops_inside_of_loops_count_too() -> None:
    position = Position()
    outer = enter(position, length=2)
    said = []
    for index in range(2):
        go(position, outer, index)
        training = enter(position, length=3)
        for part in range(3):
            go(position, training, part)
            steps = enter(position, length=30)
            go(position, steps, *range(31))
            position.leave(steps)
        position.leave(training)
        validation = enter(position, length=10)
        go(position, validation, *range(6))
        said.append(position.done)
        position.leave(validation)
    assert said == pytest.approx([0.5, (1 + 95 / 100) / 2])


def test_a_loop_that_comes_in_some_iterations_alone_lets_the_share_never_fall() -> None:
    position, said = Position(), []
    outer = enter(position, length=6)
    for index in range(6):
        go(position, outer, index)
        for length in (20, 5) if index % 2 else (20,):
            inner = enter(position, length=length)
            for step in range(length):
                go(position, inner, step)
                said.append(position.done)
            position.leave(inner)
    assert said == sorted(said)
    assert said[-1] == pytest.approx((5 + 24 / 25) / 6)


def test_the_next_outermost_loop_begins_with_nothing_done() -> None:
    position = Position()
    assert position.done == 0.0
    for _ in range(2):
        loop = enter(position)
        assert position.done == 0.0
        go(position, loop, 0, 1, 2, 3)
        assert position.done == pytest.approx(3 / 9)
        go(position, loop, 9)
        assert position.done == 1.0
        position.leave(loop)
        assert position.done == 0.0


def test_a_loop_without_an_end_or_without_iterations() -> None:
    position = Position()
    outer = enter(position, length=10**400)
    go(position, outer, 0)
    go(position, enter(position, length=10**400), 10**399)
    go(position, outer, 10**399)
    go(position, enter(position, length=10**400), 10**399)
    assert position.done == pytest.approx(0.1)
    position.leave(outer)
    go(position, enter(position, length=0), 0)
    assert position.done == 1.0


def aimed(*path: Mark) -> Position:
    position = Position()
    position.go_to(path)
    return position


def test_a_joiner_comes_to_the_path_that_it_was_given() -> None:
    position = aimed(Mark(1, 3, STEPS), Mark(1, 2, EPOCH))
    before = enter(position)
    assert go(position, before, 0) == [9], "a loop before the path ends at once"
    position.leave(before)
    outer = enter(position)
    assert go(position, outer, 0) == [3]
    assert position.aims
    beside = enter(position, EPOCH, 5)
    assert go(position, beside, 0) == [5]
    position.leave(beside)
    inner = enter(position, EPOCH, 5)
    assert go(position, inner, 0) == [2]
    assert not position.aims
    assert go(position, inner, 3) == [3]
    assert go(position, outer, 4) == [4]


def test_a_joiner_that_fell_behind_leaves_loops_to_come_to_a_later_path() -> None:
    position = Position()
    go(position, outer := enter(position), 0)
    go(position, inner := enter(position, EPOCH, 5), 0, 1)
    position.go_to((Mark(0, 2, STEPS), Mark(0, 0, EPOCH)))
    assert go(position, inner, 2) == [5]
    position.leave(inner)
    assert go(position, outer, 1) == [2]
    assert go(position, enter(position, EPOCH, 5), 0) == [0]
    assert not position.aims


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            (Mark(0, 3, STEPS), Mark(0, 1, EPOCH)),
            "did not come to where the others are: iteration 1 of batches",
        ),
        ((Mark(0, 3, "steps(7)"),), r"comes to the loop steps\(9\), the others are in steps\(7\)"),
    ],
)
def test_a_joiner_with_another_program_is_told(path: tuple[Mark, ...], message: str) -> None:
    position = aimed(*path)
    loop = enter(position)
    with pytest.raises(UsageError, match=message):
        go(position, loop, 0, 4)


def test_a_joiner_whose_function_ends_too_soon_is_told() -> None:
    position = aimed(Mark(2, 0, STEPS))
    go(position, enter(position), 0)
    with pytest.raises(UsageError, match="did not come to where the others are"):
        position.leave_all()


def test_a_loop_whose_leaving_a_handler_has_interrupted_is_left_by_the_next() -> None:
    """Python drops what is raised while an iterator ends because nothing holds it any more."""
    position = Position()
    ends: list[str] = []

    def interrupted() -> None:
        ends.append("interrupted")
        if len(ends) == 1:
            raise KeyboardInterrupt

    first = position.enter("steps(3)", 3, interrupted)
    position.advance(first, 0)
    first.over = True
    with pytest.raises(KeyboardInterrupt):
        position.leave(first)
    second = position.enter("steps(2)", 2, lambda: ends.append("second"))
    assert (second.id, second.depth) == ((1,), 0), "not inside of the first"
    assert ends == ["interrupted", "interrupted"]
    position.leave(second)
    assert (position.path, ends[-1]) == ((), "second")


def test_the_loops_that_were_over_are_those_that_a_server_passes() -> None:
    def come(position: Position, *lengths: int) -> None:
        """Two loops, and in iteration 1 of the second one two more; then the path."""
        for plan in (f"steps({lengths[0]})", STEPS):
            go(position, outer := enter(position, plan), 0)
            if plan != STEPS:
                position.leave(outer)
        go(position, enter(position, "steps(4)"), 0)
        go(position, outer, 1)
        for plan in (f"steps({lengths[1]})", EPOCH):
            go(position, inner := enter(position, plan), 0)
            if plan != EPOCH:
                position.leave(inner)

    there = Position()
    come(there, 3, 2)
    assert there.over == [((0,), "steps(3)"), ((1, 1, 0), "steps(2)")]
    for lengths in ((3, 2), (7, 2), (3, 7)):
        here = Position()
        here.go_to(there.path, may_be_longer=True)
        here.advance(first := enter(here, f"steps({lengths[0]})"), 0)
        here.leave(first)
        assert here.advance(enter(here, STEPS), 0) == 1
        here.advance(second := enter(here, f"steps({lengths[1]})"), 0)
        here.leave(second)
        here.advance(enter(here, EPOCH), 0)
        assert not here.aims
        if lengths == (3, 2):
            here.check_passed(there.over)
            assert here.over == there.over
            continue
        with pytest.raises(UsageError, match=r"the loop steps\([23]\) was over, and is steps\(7\) here"):
            here.check_passed(there.over)
