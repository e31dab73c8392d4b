"""A stream is given the newest value of each part, however slow its reader is."""

from __future__ import annotations

from bml.web.board import Board


def test_a_new_stream_is_given_everything_in_order() -> None:
    board = Board()
    board.put({"page": b"1", "fabric": b"f"})
    assert board.since(0) == (1, b"event: fabric\ndata: f\n\nevent: page\ndata: 1\n\n")


def test_only_what_changed_is_sent_again() -> None:
    board = Board()
    board.put({"page": b"1", "fabric": b"f"})
    seen, _ = board.since(0)
    board.put({"page": b"1", "fabric": b"f"})
    assert board.since(seen) == (seen, b"")
    board.put({"page": b"2", "fabric": b"f"})
    assert board.since(seen)[1] == b"event: page\ndata: 2\n\n"


def test_a_slow_reader_misses_pages_and_nothing_is_kept_for_it() -> None:
    board = Board()
    for number in range(1000):
        board.put({"page": b"%d" % number})
    assert board.since(1) == (1000, b"event: page\ndata: 999\n\n")


def test_the_last_page_is_known_to_be_the_last() -> None:
    board = Board()
    board.put({"page": b"1"})
    assert not board.is_last
    board.put({"page": b"1"}, is_last=True)
    assert board.is_last
