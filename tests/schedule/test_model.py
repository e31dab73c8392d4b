"""GenModel: its closed forms, what `auto` makes of it, and that an impossible wish is replaced."""

import json
import os
from dataclasses import astuple, replace
from fractions import Fraction

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.cluster.spec.constants import (
    constants_of_emulated,
    constants_of_one_host,
    load_constants,
    store_constants,
)
from bml.schedule import Schedules, plan
from bml.schedule.select.model import Constants, counts, counts_of_bml
from bml.topology import UsageError, parse


@pytest.mark.parametrize("n", [3, 8, 13])
def test_one_level_is_the_published_formula(n):
    fabric = parse(f"switch:{n}")
    found = counts(plan(fabric, "mesh").forest, fabric)
    assert found.rounds == 2
    assert found.wire == Fraction(2 * (n - 1), n)
    assert found.added == Fraction(n - 1, n)
    assert found.touched == Fraction(n + 1, n)
    assert found.incast == n - 1
    unit = Constants(1.0, 10.0, 100.0, 1000.0, 10000.0)
    expected = 2 + 1000 * (10 * 2 * (n - 1) / n + 100 * (n - 1) / n + 1000 * (n + 1) / n + 10000 * (n - 1))
    assert found.seconds(1000, unit) == pytest.approx(expected)


@pytest.mark.parametrize("n", [3, 8])
def test_a_ring_touches_memory_three_times_as_often(n):
    fabric = parse(f"switch:{n}")
    found = counts(plan(fabric, "ring").forest, fabric)
    assert found.rounds == 2 * (n - 1)
    assert (found.added, found.touched) == (Fraction(n - 1, n), Fraction(3 * (n - 1), n))
    assert found.incast == 0


@pytest.mark.parametrize("name", ["bcube:3x2", "bcube:2x3", "bcube:4x3", "bcube:2x2", "bcube:5x1"])
def test_bml_in_closed_form_is_bml_counted(name):
    fabric = parse(name)
    assert counts_of_bml(fabric) == counts(plan(fabric, "bml").forest, fabric) == plan(fabric, "bml").counts()


def test_exchange_and_detours_count_their_rounds():
    fabric = parse("bcube:4x2")
    found = plan(fabric, "exchange").counts()
    assert (found.rounds, found.wire, found.added, found.touched, found.incast) == (2, 3, 6, 10, 24)
    # Stage 1 of the paper's schedule has detours of two hops, up and down.
    assert plan(fabric.without("server:0"), "detour").counts().rounds == 6


def test_auto_chooses_by_size_and_shows_the_prices():
    fabric = parse("bcube:4x2")
    small, large = plan(fabric, nbytes=4096), plan(fabric, nbytes=1 << 20)
    assert (small.algorithm, large.algorithm) == ("exchange", "bml")
    assert small.why == "least modelled time for 4096 bytes"
    assert [price.algorithm for price in small.prices] == ["exchange", "bml", "mesh"]
    assert (plan(fabric).algorithm, plan(fabric).prices) == ("bml", ())
    free_start = Constants(alpha_s=0.0)
    assert plan(fabric, nbytes=4096, constants=free_start).algorithm == "bml"
    assert plan(fabric.without("server:3"), nbytes=4096).algorithm == "mesh"


def test_constants_are_stored_and_read(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "constants.json"
    measured = Constants(1e-5, 1e-9, 2e-10, 3e-10, 4e-12)
    assert store_constants(measured, path) == path
    assert load_constants(path) == (measured, f"constants of {path}")
    monkeypatch.setenv("BML_CONSTANTS", str(path))
    assert load_constants()[0] == measured
    monkeypatch.setenv("BML_CONSTANTS", str(tmp_path / "none.json"))
    assert load_constants() == (Constants(), "default constants, not measured here")


@pytest.mark.parametrize("homes", [{}, {"HOME": "/dev/null"}])
def test_a_user_without_a_home_has_the_default_constants(homes, monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CONFIG_HOME", "BML_CONSTANTS"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in homes.items():
        monkeypatch.setenv(name, folder)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert load_constants() == (Constants(), "default constants, not measured here")
    with pytest.raises(UsageError, match=r"no home folder|cannot be written"):
        store_constants(Constants())


def test_a_home_of_another_user_has_no_constants(monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.delenv("BML_CONSTANTS", raising=False)
    monkeypatch.setattr("pathlib.Path.exists", refused)
    assert load_constants() == (Constants(), "default constants, not measured here")


def test_on_an_emulated_fabric_bytes_count_for_more(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    fabric = parse("bcube:3x2")
    slow = Schedules(fabric, constants=constants_of_emulated(Constants(), 23.85e6, 9))
    assert [slow.for_nbytes(n << 10).algorithm for n in (4, 16, 64)] == ["exchange", "exchange", "bml"]
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    own_cores = Schedules(fabric, constants=constants_of_emulated(Constants(), 23.85e6, 9))
    assert [each.for_nbytes(16 << 10).algorithm for each in (slow, own_cores)] == ["exchange", "bml"]


def test_servers_of_one_host_share_its_cores(monkeypatch):
    """Nine servers on two cores: a byte takes 4.5 times as long, and a round 675 µs."""
    known = Constants(4e-5, 8e-10, 1e-10, 2e-10, 4e-12)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    shared = constants_of_one_host(known, 9)
    assert astuple(shared) == pytest.approx((675e-6, 3.6e-9, 4.5e-10, 9e-10, 1.8e-11))
    damaged = parse("bcube:3x2").without("server:0")
    assert Schedules(damaged, constants=shared).for_nbytes(1 << 20).algorithm == "mesh"
    assert Schedules(damaged, constants=known).for_nbytes(1 << 20).algorithm == "packed"
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert constants_of_one_host(known, 9) == replace(known, alpha_s=150e-6)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"alpha_s": "x"}', None])
def test_files_that_hold_no_constants(tmp_path, text):
    path = tmp_path / "constants.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match="it must be a JSON object of alpha_s, beta_s"):
        load_constants(path)


def test_the_command_explains_its_choice(tmp_path):
    path = store_constants(Constants(alpha_s=0.0), tmp_path / "c.json")
    result = CliRunner().invoke(
        main, ["plan", "bcube:4x2", "--bytes", "4KiB", "--constants", str(path), "--json"]
    )
    report = json.loads(result.stdout)
    assert report["algorithm"] == "bml"
    assert report["why"] == "least modelled time for 4096 bytes"
    assert report["candidates"][0] == {
        "algorithm": "bml",
        "modelled_s": report["modelled_s"],
        "least_s": pytest.approx(report["modelled_s"], rel=0.5),
        "works": True,
    }
    assert report["constants"] == f"constants of {path}"
    assert report["modelled_s"] > 0
