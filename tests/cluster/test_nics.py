"""The addresses of NICs in BML_NICS, also by the names of interfaces."""

from __future__ import annotations

import pytest

from bml.cluster.spec.nics import interfaces, nics_of
from bml.errors import UsageError

HERE = {
    "eth0": ["10.0.0.4"],
    "eth1": ["10.1.0.4"],
    "eth2": list[str](),
    "eth3": ["10.3.0.4", "10.3.0.5"],
    "eth1:1": ["10.1.0.9"],
}


def nics(setting: str, levels: int = 2, server: int | None = None) -> tuple[str, ...]:
    return nics_of({"BML_NICS": setting}, levels, server, lambda: HERE)


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("10.0.0.4,10.1.0.4", ("10.0.0.4", "10.1.0.4")),
        ("eth0,eth1", ("10.0.0.4", "10.1.0.4")),
        (" eth1 , 10.9.9.9 ", ("10.1.0.4", "10.9.9.9")),
        ("fd00::1,eth1:1", ("fd00::1", "10.1.0.9")),
        ("10.0.0.4,10.0.0.4", ("10.0.0.4", "10.0.0.4")),
        ("", ()),
        ("  ", ()),
    ],
)
def test_addresses_and_interfaces_are_read(setting: str, found: tuple[str, ...]) -> None:
    assert nics(setting) == found


def test_n_stands_for_the_number_of_the_server() -> None:
    assert nics("10.7.0.{n},10.7.1.{n}", server=4) == ("10.7.0.5", "10.7.1.5")
    assert nics("eth{n},10.7.1.{n}", server=0) == ("10.1.0.4", "10.7.1.1")
    with pytest.raises(UsageError, match="neither an IP address nor an interface"):
        nics("10.7.0.{n},10.7.1.{n}")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("eth0", "give an address or an interface for each of 2 levels"),
        ("eth0,eth1,eth2", "each of 2 levels"),
        ("eth0,", "names '', which is neither"),
        ("eth0,ens9", "names 'ens9', which .*; there are eth0, eth1, eth2, eth3, eth1:1"),
        ("eth0,10.0.0", "names '10.0.0', which is neither an IP address nor an interface"),
        ("eth0,eth2", "eth2, which has no IPv4 address"),
        ("eth0,eth3", "eth3, which has the addresses 10.3.0.4, 10.3.0.5: give the one"),
        ("eth0,eth0", "another interface for each level"),
        ("eth0,10.0.0.4", "another interface for each level"),
    ],
)
def test_a_setting_that_names_no_nics_is_refused(setting: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"^BML_NICS .*{says}"):
        nics(setting)


def test_interfaces_of_this_machine_are_found() -> None:
    assert interfaces()["lo"][0].startswith("127.")
    assert nics_of({"BML_NICS": "lo"}, 1) == (interfaces()["lo"][0],)
