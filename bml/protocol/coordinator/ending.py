"""The end of a job as its coordinator brings it about, and the answers to servers that appear after it."""

from __future__ import annotations

from collections.abc import Iterable

from bml.protocol.coordinator.events import Connected, Event, Finished, From, Instruction, Post
from bml.protocol.wire import messages as msg


class Ending:
    """The end of a job of these servers, as the coordinator of this `term` brings it about.

    `outcomes` say how the training functions ended that have.
    """

    def __init__(self, term: int, servers: Iterable[int]):
        self.outcomes: dict[int, str] = {}
        self._returned: dict[int, int] = {}
        self._term = term
        self._servers = tuple(servers)
        self._final_message: msg.ToServer | None = None

    def done(self, servers: Iterable[int]) -> bool:
        """Whether the training functions of all of these returned."""
        return all(self.outcomes.get(server) == "done" for server in servers)

    def ended(self, server: int, outcome: str, step: int) -> bool:
        """A training function has ended, its last result being that of `step`; returns whether that is news.

        It is news if no server returned as early: one server that need not be awaited is enough to name, as
        in the end all return.
        """
        self.outcomes[server] = outcome
        if outcome != "done" or server in self._returned:
            return False
        earlier = min(self._returned.values(), default=step + 1)
        self._returned[server] = step
        return step < earlier

    def comes_again(self, server: int) -> None:
        """Forget how earlier incarnations of a server ended."""
        self.outcomes.pop(server, None)
        self._returned.pop(server, None)

    def forget_others(self, members: Iterable[int]) -> None:
        """A view of these is in force: the others may come again, in another incarnation."""
        self._returned = {each: self._returned[each] for each in members if each in self._returned}

    def tell_returned(self, servers: Iterable[int], contributors: Iterable[int]) -> list[Instruction]:
        """Tell these servers which contributor returned first: it need not be awaited in a later step."""
        returned = ((self._returned[each], each) for each in contributors if each in self._returned)
        first = min(returned, default=None)
        if first is None:
            return []
        step, gone = first
        return [Post(server, msg.Returned(self._term, gone, step)) for server in servers]

    def finish(self) -> list[Instruction]:
        """The work is done."""
        return self._tell(msg.Shutdown(self._term), Finished(None))

    def abort(self, kind: str, text: str, server: int = -1) -> list[Instruction]:
        """It cannot go on."""
        abort = msg.Abort(self._term, kind, text, server)
        return self._tell(abort, Finished(abort))

    def deposed(self, term: int) -> list[Instruction]:
        """A successor with this term is at work: this coordinator sends nothing more."""
        self._final_message = None
        return [Finished(None, deposed_by=term)]

    def answer_late(self, event: Event) -> list[Instruction]:
        """After the end: tell every server that still appears."""
        match event:
            case Connected(server) if self._final_message:
                return [Post(server, self._final_message)]
            case From(_, msg.Deposed(_, term)) if term > self._term:
                return self.deposed(term)
        return []

    def _tell(self, final_message: msg.ToServer, finished: Finished) -> list[Instruction]:
        self._final_message = final_message
        return [*(Post(server, final_message) for server in self._servers), finished]
