"""The kinds of faults, for tests that go through all of them: a new one is tested without being named.

A kind that the matrix leaves out stands here with the reason.
"""

from __future__ import annotations

from bml.faults.kinds import KINDS, Part

NOT_IN_MATRIX = {
    "join": "it is no fault: servers join in the phases `joining` and `giving` of the matrix",
    "stall": "tests/cluster/test_stall_processes.py: which server reports it depends on the schedule",
    "busy": "it breaks nothing: tests/cluster/test_busy_processes.py",
    "degrade": "it needs an emulated fabric: tests/fabric/test_slow_cables.py",
    "jitter": "it breaks nothing: tests/cluster/test_jitter_processes.py",
    "node": "it needs an emulated fabric: tests/fabric/test_ray_on_emulated_fabric.py",
    "slow": "it breaks nothing: tests/cluster/test_slow_processes.py, tests/fabric/test_slow_cables.py",
    "loss": "it needs an emulated fabric: tests/fabric/test_faults_on_emulated_fabric.py",
}
MATRIX_SETTINGS = {
    "freeze": {"for": "2s"},
    "freeze:coordinator": {"for": "2s"},
    "gil": {"for": "2s"},
    "flap": {"every": "0.4s", "for": "1s"},
}
"""Settings that cells of the matrix give. A flap ends before it is missed, or is missed as a dead link is."""
OF_THE_COORDINATOR = tuple(
    written
    for name, kind in KINDS.items()
    for written in ([name] if not kind.target else [f"{name}:coordinator"] if kind.coordinator else [])
)
"""As they are written: `coordinator` and `freeze:coordinator`."""
IN_MATRIX = tuple(
    name for name in KINDS if name not in NOT_IN_MATRIX and name not in OF_THE_COORDINATOR
) + tuple(OF_THE_COORDINATOR)
OF_LINKS = tuple(name for name, kind in KINDS.items() if kind.target in ("link", "switch"))
"""Those that strike data on links, which servers that share memory do not send."""

MATRIX_BREAKS: dict[str, Part] = {
    "kill": "server",
    "freeze": "server",
    "cut": "link",
    "blackhole": "link",
    "switch": "switch",
    "leave": "server",
    "exception": "",
    "exit": "server",
    "gil": "",
    "flap": "",
    "coordinator": "",
    "freeze:coordinator": "",
}
"""Written kind -> the part that is lost in a cell of the matrix, for good or until it is heard again."""
