"""The notation of failures, there and back, and what it says about any other text."""

import pytest

from bml.topology import LinkFailure, ServerFailure, SwitchFailure, UsageError, parse_failure


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("server:4", ServerFailure(4)),
        ("link:4/0", LinkFailure(4, 0)),
        ("switch:0/2", SwitchFailure(0, 2)),
    ],
)
def test_notation_is_read_and_given_back(text, failure):
    assert parse_failure(text) == failure
    assert str(failure) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("servr:4", "'servr' is not a kind of failure"),
        ("4", "the colon is missing"),
        ("", "the colon is missing"),
        ("server", "the colon is missing"),
        ("server:", "'' in 'server:' is not a number"),
        ("server:4/0", "has 2 number.s. after the colon, a server failure needs 1"),
        ("link:4", "has 1 number.s. after the colon, a link failure needs 2"),
        ("link:4/x", "'x' in 'link:4/x' is not a number"),
        ("link:-1/0", "'-1' in 'link:-1/0' is not a number"),
        ("server:99999999999", "is not a number"),
        ("switch:0/1/2", "has 3 number.s."),
    ],
)
def test_other_text_is_explained(text, says):
    with pytest.raises(UsageError, match=says):
        parse_failure(text)


def test_failures_of_all_kinds_sort_together():
    mixed = [SwitchFailure(0, 1), LinkFailure(3, 1), ServerFailure(9), LinkFailure(3, 0), ServerFailure(2)]
    assert [str(failure) for failure in sorted(mixed)] == [
        "server:2",
        "server:9",
        "link:3/0",
        "link:3/1",
        "switch:0/1",
    ]
    assert len({ServerFailure(1), ServerFailure(1), LinkFailure(1, 0)}) == 2


def test_a_failure_has_no_order_with_other_things():
    with pytest.raises(TypeError):
        assert ServerFailure(1) < 3
