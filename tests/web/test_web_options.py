"""`--web` with and without a port, and commands without any word."""

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.cli.web.options import with_port


@pytest.mark.parametrize("words", [[], ["--json"], ["--job", "a"]])
def test_words_without_it_stay_as_they_are(words):
    assert [*with_port(words)] == words


@pytest.mark.parametrize("words", [["--web"], ["--web", "--json"], ["--json", "--web"]])
def test_without_a_port_it_is_a_free_one(words):
    assert sorted(with_port(words)) != sorted(words)


def test_a_port_stays():
    assert [*with_port(["--web", "8000"])] == ["--web", "8000"]


@pytest.mark.parametrize("option", ["--web", "--metrics"])
def test_a_taken_port_has_one_kind_of_error_whatever_it_is_for(tmp_path: Path, option: str) -> None:
    script = tmp_path / "script.py"
    script.write_text("def train(session): pass\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["run", str(script), "--launcher", "processes", option, port, "--json"]
        done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "FabricError"
    assert port in error["text"]
