"""The calls that training functions make in a step: all must make the same, and a difference is found.

Every frame carries a signature of its sender's call, and of its place in the program. A server that meets
another signature than its own has found a conflict. Neighbours also tell each other their calls in words, so
that the error can name both. They do so when the call differs from the one before: to announce every place in
the program would take a frame a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from bml.errors import StepMismatch
from bml.protocol.server.events import SendText, Submit, Verdict
from bml.protocol.wire.frame import Header, Kind

_TEXTS_KEPT = 8


class Calls:
    """The calls on `server` and on its neighbours; `conflict` is the error to raise when they differ."""

    def __init__(self, server: int):
        self.conflict: StepMismatch | None = None
        self._server = server
        self._texts: dict[tuple[int, int], str] = {}
        self._newest: dict[int, str] = {}
        self._announced: tuple[str, str, str] | None = None
        self._returned: dict[int, int] = {}

    def install(self, contributors: Container[int]) -> None:
        """A view is in force: its neighbours have been told nothing yet, and others may come again."""
        self._announced = None
        self._returned = {each: step for each, step in self._returned.items() if each in contributors}

    def announce(
        self, submit: Submit, links: Iterable[tuple[int, int]], learners: Container[int], shown: bool
    ) -> list[SendText]:
        """Tell the neighbours the call of this server, if it differs from the one before.

        Learners are told in every step, as they need it to take part. Other neighbours are not told when the
        call is `shown` to all, in memory that they share.
        """
        called = submit.call.op, submit.call.dtype, _without_place(submit.call.text)
        again = shown or self._announced == called
        self._announced = called
        text = submit.call.encode()
        epoch, step, signature, size = submit.epoch, submit.step, submit.signature, len(text)
        done = []
        for peer, level in sorted(links):
            if not again or peer in learners:
                header = Header(Kind.DESCRIBE, epoch, step, self._server, peer, signature, 0, size, size)
                done.append(SendText(peer, level, header, text))
        return done

    def returned(self, server: int, step: int) -> None:
        """The training function of `server` returned after this step."""
        self._returned[server] = step

    def check_present(self, submit: Submit, contributors: Container[int]) -> None:
        """It is a conflict if one of these contributors never comes to the step."""
        for server, last in self._returned.items():
            if server in contributors and submit.step > last:
                self.conflict = StepMismatch(
                    f"step {submit.step}: server {self._server} called {submit.call.text}, but the training "
                    f"function of server {server} returned after step {last}; "
                    "every server must make the same calls"
                )

    def described(self, header: Header, text: str, n_links: int) -> None:
        """A neighbour tells its call; this server has `n_links` links."""
        while len(self._texts) >= _TEXTS_KEPT * max(1, n_links):
            self._texts.pop(next(iter(self._texts)))
        self._newest[header.origin] = said = text.partition("\n")[2] or text
        self._texts[header.origin, header.signature] = said

    def conflicting(self, submit: Submit, header: Header) -> Verdict:
        """A frame of this step has another signature than the call here: note the conflict."""
        newest = self._newest.get(header.origin)
        unknown = f"{_without_place(newest)} elsewhere in its program" if newest else "something else"
        said = self._texts.get((header.origin, header.signature), unknown)
        self.differs(submit, header.origin, said)
        return Verdict.DROP

    def differs(self, submit: Submit, origin: int, text: str) -> None:
        """Server `origin` called `text` in this step."""
        self.conflict = StepMismatch(
            f"step {submit.step}: server {origin} called {text}, but server {self._server} called "
            f"{submit.call.text}; every server must make the same calls with the same shapes and dtypes"
        )


def _without_place(text: str) -> str:
    """The text of a call without its place in the program; see bml.train.position."""
    return text.partition(" in iteration ")[0]
