"""For how long ranks may appear: as long as the program says, and a minute if it says nothing."""

from datetime import timedelta

import pytest

dist = pytest.importorskip("torch.distributed")

from bml.torch.backend import seconds_to_appear  # noqa: E402


@pytest.mark.parametrize("minutes", [0.05, 1, 5, 60])
def test_a_time_out_that_was_given_is_kept(minutes: float) -> None:
    assert seconds_to_appear(timedelta(minutes=minutes), 60.0) == 60 * minutes


def test_the_half_hour_that_pytorch_gives_without_one_is_a_minute() -> None:
    assert seconds_to_appear(dist.distributed_c10d._get_default_timeout("bml"), 60.0) == 60.0
