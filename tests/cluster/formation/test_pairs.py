"""Messages between two ranks that are real processes, in two groups at a time."""

from pathlib import Path

import pytest
from ranks import Ranks


@pytest.mark.real
def test_pairs_exchange_messages_and_a_dead_rank_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bml-second").mkdir()
    with Ranks(tmp_path, 3, program=Path(__file__).with_name("pairs_program.py")) as ranks:
        ranks.start()
        for rank in (0, 1):
            assert ranks.end(rank) == (0, "")
            assert ranks.get(rank, "pairs") == ranks.get(rank, "second") == ranks.get(rank, "after") == [True]
            errors = ranks.get(rank, "error")
            assert [each.partition(":")[0] for each in errors] == ["ContributorLost"] * 2
            assert all("rank 2" in each for each in errors)
            assert max(ranks.get(rank, "took_s")) < 30
        assert ranks.get(0, "any") == [[1, 2]]
        assert ranks.end(2)[0] == -9
        ranks.check_nothing_left()
