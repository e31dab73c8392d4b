"""Lines for the log about what happens to a job: a name, then key=value fields. None is written per step."""

from __future__ import annotations

from typing import Any

from bml.protocol.server import events as ev
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import slow_nics


def line(name: str, /, **fields: Any) -> str:
    """`suspicion server=1 peer=4 why="…"`: texts with spaces are quoted, members are joined by commas."""
    return " ".join([name, *(f"{key}={_field(value)}" for key, value in fields.items())])


def of_server(server: int, instruction: ev.Installed | ev.Stop | ev.Tell) -> str:
    """The line about what a server does; "" if it is nothing for a log."""
    if isinstance(instruction, ev.Installed):
        view = instruction.view
        return line(
            "view-installed", server=server, epoch=view.epoch, members=view.members, commit=view.commit,
            learners=view.learners, failures=view.failures, slow=tuple(slow_nics(view)), reason=view.reason,
        )  # fmt: skip
    if isinstance(instruction, ev.Stop):
        error = instruction.error
        return line("stopped", server=server, kind=type(error).__name__, error=str(error))
    match instruction.message:
        case msg.Suspect(observer, peer, level, kind, silent_s, why):
            at = {"server": observer, "peer": peer, "level": level, "kind": kind}
            return line("suspicion", **at, silent_s=round(silent_s, 3), why=why)
        case msg.Withdraw(observer, peer, level):
            return line("suspicion-withdrawn", server=observer, peer=peer, level=level)
        case msg.Leaves(_, why):
            return line("leaves", server=server, why=why)
        case msg.CaughtUp(_, epoch):
            return line("caught-up", server=server, epoch=epoch)
    return ""


def of_coordinator(term: int, server: int, message: msg.ToServer) -> str:
    """The line about what a coordinator asks of a server; "" if it is nothing for a log."""
    match message:
        case msg.Freeze(_, epoch, reason):
            return line("diagnosis", term=term, epoch=epoch, reason=reason)
        case msg.Evict(_, epoch, reason):
            return line("eviction", term=term, epoch=epoch, server=server, reason=reason)
    return ""


def _field(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "-"
    text = str(value)
    return text if text and not any(each in text for each in ' "=\n') else '"' + _escaped(text) + '"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
