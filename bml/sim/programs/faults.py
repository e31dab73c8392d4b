"""The faults of a random program's servers: deaths, departures, joins and interrupts."""

from __future__ import annotations

from dataclasses import dataclass, field


class Dead(BaseException):
    """This server has died: nothing of its training function is run any more."""


class Interrupted(BaseException):
    """The error that the handler of a signal raises."""


class Hang(BaseException):
    """A wait that nothing would end."""


@dataclass
class Faults:
    """`kills` and `leaves` by server; `joins` after so many committed steps.

    A server dies in its `kills[0]`-th call: "before" it contributes, when it has "brought" its contribution,
    or when its step is "committed" and it has not been told. One that joined dies in such a call of `doomed`,
    those counted that it replays. `interrupts`: a signal's handler raises in this server's training thread,
    after so many calls of functions by or in the session. A fault whose moment is never reached does nothing.
    With `holds_for_joiners` the others wait at a boundary until each server that was started has asked for
    the state, however late its thread runs: else it may come when they have ended. `paces`: the seconds per
    sample of a server, in turn (see `Clock`); others take one second. Each gradient takes `batch_s` besides.
    All servers die when `ends_after` steps are committed. A step with a priority is sent in pieces of
    `piece_nbytes`.
    """

    absent: tuple[int, ...] = ()
    kills: dict[int, tuple[int, str]] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    joins: list[tuple[int, int]] = field(default_factory=list)
    doomed: dict[int, tuple[int, str]] = field(default_factory=dict)
    interrupts: dict[int, int] = field(default_factory=dict)
    holds_for_joiners: bool = False
    paces: dict[int, tuple[float, ...]] = field(default_factory=dict)
    batch_s: float = 0.0
    ends_after: int | None = None
    piece_nbytes: int = 1 << 20

    def __str__(self) -> str:
        said = [f"server {server} dies in call {call}, {when}" for server, (call, when) in self.kills.items()]
        said += [f"server {server} leaves at boundary {number}" for server, number in self.leaves.items()]
        said += [f"server {server} joins after step {step}" for step, server in self.joins]
        said += [f"joined, {each} dies in call {call}, {when}" for each, (call, when) in self.doomed.items()]
        said += [f"server {server} is interrupted in function {n}" for server, n in self.interrupts.items()]
        said += [f"server {server} computes at {paces} s a sample" for server, paces in self.paces.items()]
        said += [f"all die after step {self.ends_after}"] if self.ends_after is not None else []
        return "; ".join([*(f"server {each} is absent" for each in self.absent), *said]) or "no faults"
