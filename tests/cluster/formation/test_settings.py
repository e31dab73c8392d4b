"""The job that ranks make of their settings, their hosts and the environment."""

import pytest

from bml.cluster.formation.settings import Host, Settings, fabric_of, job_of, nics_of
from bml.errors import UsageError
from bml.sharedmem import segment


def hosts(*identities: str) -> list[Host]:
    return [Host(identity, "10.0.0.1") for identity in identities]


@pytest.mark.parametrize(
    ("size", "environ", "fabric"),
    [
        (4, {}, "switch:4"),
        (4, {"BML_NICS": "10.0.0.1"}, "switch:4"),
        (4, {"BML_NICS": "10.0.0.1,10.1.0.1"}, "bcube:2x2"),
        (27, {"BML_NICS": "10.0.0.1,10.1.0.1,10.2.0.1"}, "bcube:3x3"),
        (64, {"BML_NICS": "10.0.0.1,10.1.0.1,10.2.0.1"}, "bcube:4x3"),
        (4, {"BML_NICS": "10.0.0.1,10.1.0.1", "BML_FABRIC": "torus:2x2"}, "torus:2x2"),
        (1, {"BML_NICS": "10.0.0.1,10.1.0.1"}, "switch:2"),
    ],
)
def test_the_fabric_is_named_or_made_of_the_addresses(
    size: int, environ: dict[str, str], fabric: str
) -> None:
    assert fabric_of(Settings(), size, environ) == fabric
    if size > 1:
        assert fabric_of(Settings(fabric="mesh:9"), size, environ) == "mesh:9"


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_addresses_that_make_no_bcube_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="BML_FABRIC"):
        fabric_of(Settings(), size, {"BML_NICS": "10.0.0.1,10.1.0.1"})


def test_a_fabric_has_a_server_for_each_rank() -> None:
    with pytest.raises(UsageError, match="bcube:3x2 has 9 servers, and there are 4 ranks"):
        job_of(Settings(fabric="bcube:3x2"), hosts(*"aaaa"), {})


@pytest.mark.parametrize(
    ("settings", "identities", "environ", "least"),
    [
        (Settings(), "aaaa", {}, 1),
        (Settings(), "aabb", {}, None),
        (Settings(min_servers=3), "aaaa", {"BML_MIN_SERVERS": "2"}, 3),
        (Settings(), "aaaa", {"BML_MIN_SERVERS": "2"}, 2),
        (Settings(), "aabb", {"BML_MIN_SERVERS": "1"}, 1),
    ],
)
def test_ranks_of_several_hosts_need_a_majority_unless_told_otherwise(
    settings: Settings, identities: str, environ: dict[str, str], least: int | None
) -> None:
    assert job_of(settings, hosts(*identities), environ).min_servers == least


@pytest.mark.parametrize("text", ["two", "1.5", "-"])
def test_a_wrong_least_number_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="BML_MIN_SERVERS"):
        job_of(Settings(), hosts("a", "a"), {"BML_MIN_SERVERS": text})


@pytest.mark.parametrize(
    ("settings", "environ", "detect_s"),
    [
        (Settings(), {}, 0.5),
        (Settings(), {"BML_DETECT_S": ""}, 0.5),
        (Settings(), {"BML_DETECT_S": "2.5"}, 2.5),
        (Settings(detect_s=1.0), {"BML_DETECT_S": "2.5"}, 1.0),
    ],
)
def test_the_silence_of_a_failure_is_named_by_the_environment(
    settings: Settings, environ: dict[str, str], detect_s: float
) -> None:
    assert job_of(settings, hosts("a", "a"), environ).timeouts().detect_s == detect_s


@pytest.mark.parametrize("text", ["soon", "0", "-1", "0.01", "61", "nan", "inf"])
def test_a_wrong_silence_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=f"BML_DETECT_S is '{text}': give 0.05 to 60 seconds"):
        job_of(Settings(), hosts("a", "a"), {"BML_DETECT_S": text})


def test_ranks_of_several_hosts_need_addresses() -> None:
    found = [Host("a", "10.0.0.1"), Host("b", "127.0.0.1")]
    with pytest.raises(UsageError, match=r"rank 1 knows only its address 127\.0\.0\.1"):
        job_of(Settings(), found, {})
    assert job_of(Settings(), found, {"BML_NICS": "10.0.0.2"}).transport == "tcp"


def test_one_host_shares_memory_and_several_do_not() -> None:
    one = "tcp" if segment.why_not() else "shm"
    assert job_of(Settings(), hosts("a", "a"), {}).transport == one
    assert job_of(Settings(), hosts("a", "b"), {}).transport == "tcp"
    assert job_of(Settings(transport="tcp"), hosts("a", "a"), {}).transport == "tcp"


def test_a_rank_alone_is_a_job() -> None:
    assert job_of(Settings(), hosts("a"), {}).servers == (0,)


def test_addresses() -> None:
    assert nics_of(0, 2, None, {}) == ("127.10.0.1", "127.11.0.1")
    assert nics_of(0, 2, "10.0.0.7", {}) == ("10.0.0.7", "10.0.0.7")
    assert nics_of(3, 2, None, {"BML_NICS": "10.0.0.{n}, 10.1.0.{n}"}) == ("10.0.0.4", "10.1.0.4")
    with pytest.raises(UsageError, match="for each of 2 levels"):
        nics_of(0, 2, None, {"BML_NICS": "10.0.0.1"})
