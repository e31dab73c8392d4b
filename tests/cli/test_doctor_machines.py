"""`bml doctor` on machines that lack something: it says what, whatever it meets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bml.cli.doctor import _emulated_fabric, _nics, _package
from bml.fabric import network, state
from bml.topology import FabricError


def test_a_folder_with_the_name_of_a_package_is_not_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_folder_beside").mkdir()
    (tmp_path / "a_folder_beside" / "notes.txt").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    check = _package("it", "a_folder_beside", "examples", "bml[it]")
    assert not check.usable
    assert f"({tmp_path / 'a_folder_beside'} is another package of that name)" in check.why
    assert "pip install 'bml[it]'" in check.why


def test_packages_that_are_there_and_are_not() -> None:
    assert _package("it", "click", "commands", "click").usable
    check = _package("it", "no_such_package_anywhere", "examples", "bml[it]")
    assert (check.usable, check.why) == (False, "not installed, needed for examples: pip install 'bml[it]'")


@pytest.mark.parametrize("why", ["Read-only file system", "Operation not permitted"])
def test_what_keeps_a_fabric_from_being_made_is_said(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refuse(*_: object) -> None:
        raise FabricError(f"cannot build switch:2 in network namespaces: {why}")

    monkeypatch.setattr(network, "build", refuse)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("bml.fabric.inventory.ours", lambda name: [])
    check = _emulated_fabric()
    assert not check.usable
    assert why in check.why or "pyroute2" in check.why or "kept in" in check.why


def test_a_folder_that_cannot_be_written_is_a_fabric_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FOLDER", tmp_path / "nowhere")
    condition = network.Condition(10**6, 10**6)
    made = state.State.of("bcube:2x2", condition, complete=True, maker=0, alone=False)
    with pytest.raises(
        FabricError, match=r"lab.json, which says what is up, cannot be written: No such file"
    ):
        state.save("lab", made)


@pytest.mark.parametrize(
    ("nics", "usable"),
    [("127.0.0.1", True), ("127.0.0.1,203.0.113.7", False), ("10.9.8.{n}", True), ("", True)],
)
def test_addresses_of_other_machines_are_no_nics_of_this_one(
    monkeypatch: pytest.MonkeyPatch, nics: str, usable: bool
) -> None:
    monkeypatch.setenv("BML_NICS", nics)
    check = _nics()
    assert check.usable is usable
    assert usable or "203.0.113.7 is not an address of this machine" in check.why
