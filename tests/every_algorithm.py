"""The registered algorithms, for tests that go through all of them: a new one is tested without being named.

An algorithm that some tests leave out stands here with the reason.
"""

from __future__ import annotations

from bml.schedule.algorithms.registry import registered
from bml.schedule.select.available import ALGORITHMS

NAMES = [name for name in ALGORITHMS if name != "auto"]
"""Every name; `auto` is always one of the others."""
EXAMPLES = [example for one in registered().values() for example in one.examples]
SPELLINGS = sorted({*NAMES, *EXAMPLES, "ps:2", "flextree:1"})
"""Every name, alone and with arguments."""

NO_FOREST = {"exchange": "it has rounds in place of trees: tests/schedule/test_exchange.py"}
NOT_ON_ENGINES = {
    "exchange": "it has an engine of its own: tests/schedule/test_exchange.py",
    "detour": "it is bml under another name",
}
NOT_SIMULATED = {
    "detour": "it is bml under another name",
    "exchange": "most damage makes it impossible: test_an_exchange_that_a_crash_makes_impossible_is_replaced",
}

FORESTS = [each for each in SPELLINGS if each.partition(":")[0] not in NO_FOREST]
"""Every spelling that makes trees."""
ON_ENGINES = ["auto", *(name for name in NAMES if name not in NOT_ON_ENGINES)]
SIMULATED = ["auto", *(name for name in NAMES if name not in NOT_SIMULATED)]
