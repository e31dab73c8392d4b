"""Gloo and OpenMPI on the one switch beside an emulated fabric: they work at its rate."""

import json

import pytest
from click.testing import CliRunner

from bml.cli import main
from bml.lab.bench import room
from bml.lab.bench.contenders import missing
from bml.pytest_plugin import BringUp

SIZE = 1 << 20


@pytest.mark.real
@pytest.mark.timeout(120)
@pytest.mark.parametrize("who", ["gloo", "openmpi"])
def test_peers_are_measured_over_their_one_nic(emulated_fabric: BringUp, who: str) -> None:
    why = missing(who)
    if why is not None:
        pytest.skip(why)
    network = emulated_fabric("bcube:2x1", "100mbit")
    network.shape(one_switch_rate="50mbit")
    named = ["--fabric-emulated", "--fabric-name", network.name, "--fabric", "bcube:2x1"]
    settings = ["--sizes", "1MiB", "--repetitions", "1", "--block-s", "0.1", "--json"]
    result = CliRunner().invoke(main, ["bench", "allreduce", *named, *settings, "--against", who])
    assert result.exit_code == 0, result.output
    found = {row["who"]: row for row in json.loads(result.stdout)["rows"]}
    assert set(found) == {"bml", who}
    assert all(row["wrong"] == 0 for row in found.values())
    # Bytes over 50 Mbit/s: nothing but the shaped NIC could have been in its way, and nobody can beat it.
    assert found[who]["theory_s"] == pytest.approx(SIZE / (50e6 / 8 * 0.954), rel=0.01)
    assert found[who]["median_s"] > 0.7 * found[who]["theory_s"]


def test_words_reach_the_command_as_they_are() -> None:
    command = room.command("bml", 4, ["echo", "two words", "$HOME"])
    assert command[-2:] == ["s4", "exec echo 'two words' '$HOME'"]
