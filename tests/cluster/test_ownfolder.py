"""Folders of processes that were killed are removed by the next process that makes one, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bml.cluster.fleets.ownfolder import OwnFolder

MAKES = """
import sys, time
from bml.cluster.fleets.ownfolder import OwnFolder
folder = OwnFolder("own-", sys.argv[1])
print(folder.path, flush=True)
time.sleep(600)
"""


def makes_one(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", MAKES, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_only_folders_of_the_dead_are_removed(tmp_path: Path) -> None:
    (tmp_path / "own-of-others").mkdir()
    living, kept = makes_one(tmp_path)
    killed, stale = makes_one(tmp_path)
    with living, killed:
        assert stale.is_dir()
        (stale / "session").mkdir()
        (stale / "session" / "log").write_text("text")
        killed.kill()
        killed.wait()
        assert stale.is_dir()
        folder = OwnFolder("own-", str(tmp_path))
        assert {*tmp_path.iterdir()} == {tmp_path / "own-of-others", kept, Path(folder.path)}
        living.kill()
    folder.remove()
    folder.remove()
    assert not Path(folder.path).exists()
