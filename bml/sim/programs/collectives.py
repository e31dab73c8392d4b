"""The collectives of random programs: lines that a user could write, with the checks of what each gives.

What is added to the state is the same number whoever contributed. What depends on the servers (whose value
came, in which place it lies) is asserted in the program itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bml.errors import ContributorLost
from bml.sim.programs.oracle import OracleSession
from bml.train.bfloat16 import BFLOAT16, from_float32, to_float32

LINES: tuple[tuple[str, ...], ...] = (
    ("momentum += session.broadcast{a}(w[0], {root}){w}",),
    (
        "{got} = session.broadcast{a}([np.array([session.server]), w[0]], {root}){w}",
        "assert {got}[0] == source(session, {root}), ({got}, session.contributors)",
        "momentum += {got}[1]",
    ),
    (
        "{got} = w[0] + 0.0",
        "session.broadcast{a}({got}, {root}, out={got}){w}",
        "momentum += {got}",
    ),
    (
        "{got} = session.all_gather{a}(np.append(w[0], session.server)){w}",
        "assert is_placed(session, {got}), ({got}, session.contributors)",
        "momentum += next(each for each in {got} if each is not None)[:3]",
    ),
    (
        "{got} = [np.full(1, -1, np.int8) for _ in range(session.n_servers)]",
        "{got} = session.all_gather{a}(np.array([session.server], np.int8), out={got}){w}",
        "assert is_placed(session, {got}), ({got}, session.contributors)",
    ),
    (
        "{got} = session.gather{a}(np.append(session.server, session.server), {root}){w}",
        "assert ({got} is not None) == (session.server == {root})",
        "assert {got} is None or is_placed(session, {got}), ({got}, session.contributors)",
    ),
    (
        "{got} = [np.array([to, session.server]) for to in range(session.n_servers)]",
        "{got} = session.all_to_all{a}({got}){w}",
        "assert is_placed(session, {got}), ({got}, session.contributors)",
        "assert all(each is None or each[0] == session.server for each in {got}), {got}",
    ),
    (
        "{got} = session.reduce{a}(np.floor(w[0]), {root}){w}",
        "assert ({got} is not None) == (session.server == {root})",
        "assert {got} is None or ({got} == np.floor(w[0]) * len(session.contributors)).all(), {got}",
    ),
    (
        "{got} = [np.floor(w[0]) + to for to in range(session.n_servers)]",
        "{got} = session.reduce_scatter{a}({got}, 'avg'){w}",
        "momentum += {got} - session.server",
    ),
    (
        "{got} = [np.floor(w[0]) + to for to in range(session.n_servers)]",
        "try:",
        "    {got} = session.scatter{a}({got}, {root}){w}",
        "except ContributorLost:",
        "    assert {root} not in session.contributors",
        "    {got} = {got}[session.server]",
        "momentum += {got} - session.server",
    ),
    ("momentum += session.allreduce{a}(np.floor(w[0]), 'avg'){w}",),
    (
        "{got} = np.floor(w[0])",
        "session.allreduce{a}({got}, 'avg', out={got}){w}",
        "momentum += {got}",
    ),
    (
        "{got} = session.allreduce{a}(np.array([True, False, session.server >= 0]), 'prod'){w}",
        "assert {got}.tolist() == [True, False, True]",
    ),
    (
        "{got} = from_float32(np.full(3, 2.5, np.float32)).view(BFLOAT16)",
        "momentum += to_float32(session.allreduce{a}({got}, 'avg'){w}.view(np.uint16))",
    ),
)
"""`{root}` is an expression for a server, `{got}` a new name; `{a}` and `{w}` begin a step and wait."""
ROOTS = ("0", "1", "session.n_servers - 1")


def source(session: Any, root: int) -> int:
    """The server whose value a broadcast gives; the oracle has one value only, that of its own server."""
    if isinstance(session, OracleSession):
        return session.server
    return root if root in session.contributors else min(session.contributors)


def is_placed(session: Any, found: Sequence[Any]) -> bool:
    """Whether each array of a list has, as its last number, the id of the server in whose place it lies.

    The place of a server that did not contribute must be empty.
    """
    if len(found) != session.n_servers:
        return False
    if isinstance(session, OracleSession):
        return all(each[-1] == session.server for each in found)
    expected = [server if server in session.contributors else None for server in range(len(found))]
    return [None if each is None else each[-1] for each in found] == expected


NAMES: dict[str, Any] = {
    "BFLOAT16": BFLOAT16,
    "ContributorLost": ContributorLost,
    "from_float32": from_float32,
    "is_placed": is_placed,
    "source": source,
    "to_float32": to_float32,
}
"""What the lines use beside the session."""
