"""`bml figures`: its files, its JSON, its table, and how it ends on bad input."""

from __future__ import annotations

import json
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import commands
import pytest
from click.testing import CliRunner, Result

from bml.cli import main
from bml.errors import FabricError
from bml.lab.commands.figures import picture
from bml.lab.commands.figures.shown import Made, write
from bml.lab.figures import available  # noqa: F401 (registers the figures)
from bml.lab.figures.fat_tree import switch_counts
from bml.lab.figures.figure import Basis, How, Point, chosen


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["figures", *arguments])


@pytest.mark.slow
def test_one_figure_in_json_and_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = run("switch-share", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert set(answer) == {"figures", "absent", "files", "seconds"}
    assert len(answer["figures"]) == 9
    for row in answer["figures"]:
        assert row["name"] == "switch-share"
        assert row["ours"] == pytest.approx(row["published"])
        assert (row["ratio"], row["how"], row["basis"]) == (1, "theory", "formula")
    assert answer["files"] == [str(out / "switch-share.svg"), str(out / "switch-share.json")]
    written = json.loads((out / "switch-share.json").read_text())
    assert [point["what"] for point in written["points"]] == [row["what"] for row in answer["figures"]]
    assert {path.name for path in out.iterdir()} == {"switch-share.svg", "switch-share.json"}
    assert "1 of 1: switch-share" in result.stderr
    assert str(out) in result.stderr


@pytest.mark.slow
def test_a_picture_is_an_svg_without_a_background(tmp_path: Path) -> None:
    assert run("hips-reductions", "--out", str(tmp_path)).exit_code == 0
    text = (tmp_path / "hips-reductions.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert len(text) < 100_000
    words = "".join(root.itertext())
    assert all(word in words for word in ("BCube against mesh", "torus against ring", "published", "16x4"))
    assert "fill: #ffffff" not in text, "white would blind in a dark page"


def test_a_published_range_is_lines_and_a_relative_figure_has_one_at_its_best() -> None:
    pytest.importorskip("matplotlib")
    points = [
        Point("a", "4 KiB", 3.0, How.theory, 6.0, Basis.formula),
        Point("b", "4 KiB", 2.0, How.theory),
        Point("a", "1 MiB", None, How.theory, 1.0, Basis.value),
        Point("a", "1 GiB", 0.0, How.theory),
    ]
    drawn = picture._over_the_least(points)
    assert [(point.ours, point.published) for point in drawn] == [(1.5, 3.0), (1.0, None)], "over something"
    text = picture.draw(chosen("flextree")[0], points).decode()
    assert "times the least at that place" in text
    assert ">published<" in text
    ranged = [Point(series, "least", 1.0, How.theory, 0.8, Basis.range) for series in "ab"]
    text = picture.draw(chosen("job-completion")[0], ranged).decode()
    assert text.count("end of a published range") == 1
    assert ">published<" not in text


def test_the_same_figure_is_the_same_file(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert run("switch-count", "--out", str(tmp_path / folder)).exit_code == 0
    for name in ("switch-count.svg", "switch-count.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_table_and_what_cannot_be_had(tmp_path: Path) -> None:
    result = run("switch-count", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    for word in ("switch-count: Switches of the two fabrics", "125", "ratio", "PFC"):
        assert word in result.stdout


def test_files_go_into_figures_unless_another_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("switch-count").exit_code == 0
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "switch-count.svg",
        "switch-count.json",
    }


def test_an_unknown_name_is_refused_with_the_names(tmp_path: Path) -> None:
    result = run("gst-dcell", "--out", str(tmp_path / "figures"), "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "UsageError"
    assert "'gst-dcell' is no figure: write all, or one of" in error["text"]
    assert all(name in error["text"] for name in ("gst-bcube", "job-completion", "flextree"))
    assert not (tmp_path / "figures").exists()


def test_a_file_in_the_place_of_the_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        result = run("all", "--out", str(out))
        assert result.exit_code == 2
        assert f"as {taken} is no folder: choose another folder" in result.stderr
        assert "1 of" not in result.stderr
    assert taken.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs() -> None:
    for out in ("/proc/figures", "/proc/new/figures"):
        result = run("switch-count", "--out", out)
        assert result.exit_code == 2
        assert f"--out {out} cannot be used, as /proc may not be written (" in result.stderr
        assert "1 of" not in result.stderr


def test_a_link_to_nothing_is_refused_before_anything_runs(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nothing")
    for out in (link, link / "below"):
        result = run("switch-count", "--out", str(out))
        assert result.exit_code == 2
        assert f"as {link} is no folder: choose another folder" in result.stderr
        assert "1 of" not in result.stderr
    link.unlink()
    assert not [*tmp_path.iterdir()]


def test_all_files_are_written_or_those_of_before_stay(tmp_path: Path) -> None:
    made = [
        Made(figure, switch_counts(), b"<svg/>") for figure in (*chosen("switch-count"), *chosen("one-kth"))
    ]
    (tmp_path / "one-kth.json").mkdir()
    (tmp_path / "switch-count.svg").write_text("mine")
    with pytest.raises(FabricError, match=r"could not be written: one-kth.json in it is a folder"):
        write(made, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"one-kth.json", "switch-count.svg"}
    assert (tmp_path / "switch-count.svg").read_text() == "mine"
    (tmp_path / "one-kth.json").rmdir()
    assert sorted(write(made, tmp_path)) == sorted(str(path) for path in tmp_path.iterdir())
    assert (tmp_path / "switch-count.svg").read_text() == "<svg/>"


def test_a_full_disk_leaves_the_files_of_before(tmp_path: Path) -> None:
    made = [Made(figure, switch_counts(), b"<svg/>") for figure in chosen("switch-count")]
    for path in write(made, tmp_path):
        Path(path).write_text("mine")
    large = [replace(each, picture=bytes(1 << 20)) for each in made]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        with pytest.raises(FabricError, match="could not be written: File too large"):
            write(large, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "switch-count.svg": "mine",
        "switch-count.json": "mine",
    }


@pytest.mark.real
def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bml", "figures", "--out", str(tmp_path / "figures"), "--json"]
    with commands.begun(*command, env=commands.environment_in(tmp_path)) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("1 of "):
            assert process.poll() is None
        commands.interrupt(process, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(stdout)["error"]["kind"] == "KeyboardInterrupt"
    assert "Traceback" not in stderr
    assert not (tmp_path / "figures").exists()
    assert commands.left_of(tmp_path) == []
