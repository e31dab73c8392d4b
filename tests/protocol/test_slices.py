"""Slices: of the right order where they were measured, never out of bounds, the same on all servers."""

import pytest

from bml.protocol.step.slices import LAN_RATE, SAME_HOST_RATE, ZERO_COPY_RATE, rate_of, slice_nbytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "rate", "wanted"),
    [
        (64 * MIB, 25e6, 90.5 * 1024),
        (16 * MIB, 25e6, 45.25 * 1024),
        (64 * MIB, SAME_HOST_RATE, 2 * MIB),
        (16 * MIB, SAME_HOST_RATE, MIB),
        (4096, SAME_HOST_RATE, 32 << 10),
        (0, 25e6, 17_500),
        (480_000, 25e6, 17_500),
        (MIB, 25e6, 17_500),
        (4096, 2e6, 8 << 10),
        (4096, LAN_RATE, 32 << 10),
        (1 << 40, LAN_RATE, 4 * MIB),
    ],
)
def test_size_of_slices(nbytes: int, rate: float, wanted: float) -> None:
    assert slice_nbytes(nbytes, rate) == pytest.approx(wanted, rel=0.03)


def test_larger_vectors_and_faster_nics_have_larger_slices() -> None:
    for rate in (25e6, LAN_RATE, SAME_HOST_RATE, ZERO_COPY_RATE):
        sizes = [slice_nbytes(1 << power, rate) for power in range(32)]
        assert sizes == sorted(sizes)
    assert slice_nbytes(MIB, 25e6) <= slice_nbytes(MIB, LAN_RATE) <= slice_nbytes(MIB, SAME_HOST_RATE)


def test_one_address_elsewhere_makes_it_a_network() -> None:
    assert rate_of(["127.10.0.1", "127.11.0.9", "::1"]) == SAME_HOST_RATE
    assert rate_of(["127.10.0.1", "10.10.0.1"]) == LAN_RATE


def test_payloads_that_stay_where_they_are_have_larger_slices() -> None:
    assert rate_of(["127.10.0.1", "127.11.0.9"], zero_copy=True) == ZERO_COPY_RATE > SAME_HOST_RATE
    assert rate_of(["127.10.0.1", "10.10.0.1"], zero_copy=True) == LAN_RATE
