"""What happens to a job while it runs ends alike under both launchers: one table of events, run with each.

All jobs of a launcher run beside one that lasts as long as they do: under Ray they share its Ray.
"""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]

# Per event: faults, whether lost servers are started again, and which are gone in the end, and how.
EVENTS: dict[str, tuple[list[str], bool, dict[str, str]]] = {
    "killed": (["kill:3@step=5"], False, {"3": "its process "}),
    "exits": (["exit:3@step=5"], False, {"3": "its process "}),
    "stopped for good": (["freeze:3@step=5"], False, {"3": "it did not end after the others"}),
    "stopped for a while": (["freeze:3@step=5,for=5s"], False, {"3": "server 3 is out of view 2"}),
    "leaves": (["leave:3@step=5"], False, {"3": "server 3 is out of view 2"}),
    "killed, and comes again": (["kill:3@step=5"], True, {}),
    "another coordinator": (["coordinator@step=5", "kill:3@step=40"], False, {"3": "its process "}),
}

_PROGRAM = """
import json, os, sys, time
import bml
import numpy as np

LAUNCHER, FOLDER = sys.argv[1:]
EVENTS = json.load(open(FOLDER + "/events.json"))
WITHIN_S = 100
# Eleven processes share the cores with other tests, and nobody who lives may be missed.
PATIENT = {"launcher": LAUNCHER, "detect_s": 1.5}


def until(stop):
    def train(session):
        w = np.zeros(3)
        session.state(params=w)
        for _ in session.steps(10**9):
            stops = session.allreduce(np.array([os.path.exists(stop), 0]).astype("i4"), op="max")[0]
            w += session.allreduce(np.ones(3)) / len(session.contributors)
            if stops:
                return float(w[0])
            time.sleep(0.005)
    return train


def happen(name, faults, rejoin, gone):
    stop = FOLDER + "/" + name
    with bml.start(until(stop), "bcube:2x2", faults=faults, rejoin=rejoin, **PATIENT) as job:
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            now = job.status()
            if rejoin:
                over = now["epoch"] >= 4 and len(now["members"]) == 4 and not now["learners"]
            else:
                over = set(map(str, [*now["lost"], *now["left"]])) == set(gone)
                over |= name == "stopped for good" and now["epoch"] > 1
            if over and len(now["members"]) == 4 - len(gone):
                break
            time.sleep(0.05)
        open(stop, "w").close()
        result = job.wait(WITHIN_S)
    return {
        "over": over,
        "values": sorted(result.values),
        # Step 5 is in the third iteration, and each adds 1 whoever is lost in it.
        "equal": len(set(result.values.values())) == 1 and result.value >= 3 and result.value % 1 == 0,
        "gone": result.gone,
        "left": list(result.left),
        "views": [len(view["members"]) for view in result.report["views"]],
        "terms": now["term"],
        "never struck": list(result.never_struck),
    }


def main():
    stop = FOLDER + "/all"
    with bml.start(until(stop), "bcube:2x1", **PATIENT | {"detect_s": 5.0}) as beside:
        found = {name: happen(name, *event) for name, event in EVENTS.items()}
        open(stop, "w").close()
        found["beside"] = [sorted(beside.wait(WITHIN_S).values), {}]
    print(json.dumps(found))


main()
"""


@pytest.mark.parametrize("launcher", ["processes", pytest.param("ray", marks=pytest.mark.ray)])
def test_events_end_alike(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "events.json").write_text(json.dumps(EVENTS))
    found = commands.found_by(_PROGRAM, tmp_path, launcher, within_s=260)
    assert found.pop("beside") == [[0, 1], {}]
    for name, (_, rejoin, gone) in EVENTS.items():
        one = found[name]
        survivors = [server for server in range(4) if str(server) not in gone]
        assert (one["over"], one["values"], one["equal"]) == (True, survivors, True), (name, one)
        assert one["gone"].keys() == gone.keys(), (name, one)
        assert all(one["gone"][server].startswith(how) for server, how in gone.items()), (name, one)
        assert one["left"] == ([3] if name == "leaves" else []), (name, one)
        assert one["views"] == ([4, 3, 4, 4] if rejoin else [4, 3]), (name, one)
        assert one["terms"] == (2 if name == "another coordinator" else 1), (name, one)
        assert one["never struck"] == [], (name, one)
