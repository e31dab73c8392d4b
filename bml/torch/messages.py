"""Messages between two ranks: send and recv of torch.distributed. They pass the collectives by."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from bml.topology.errors import UsageError
from bml.torch.arguments import contiguous, listed
from bml.torch.tensors import Tensor, check, check_writable, raw
from bml.torch.work import GroupWork, WorkThread

ANY = -1
"""The source of a message that may come from any rank."""


class Messenger(Protocol):
    """Carries the bytes of arrays between two ranks; futures give the rank from which they came."""

    def begin_send(self, array: Any, to: int, tag: int = 0, /) -> Future[int]:
        """Send to one rank; the array must not change until the future is done."""
        ...

    def begin_recv(self, array: Any, source: int, tag: int = 0, /) -> Future[int]:
        """Receive from one rank or from ANY; the array is not filled until the future is done."""
        ...


class Messages:
    """The messages of one rank; `limit_s` is how long a wait may take."""

    def __init__(self, messenger: Messenger | None, rank: int, limit_s: float):
        self._messenger = messenger
        self.limit_s = limit_s
        self._name = f"bml-messages-{rank}"
        self._starting = threading.Lock()
        self._receipts: WorkThread | None = None

    def send(self, tensors: Any, to: int, tag: int) -> GroupWork:
        """Begin to send one tensor."""
        tensor = single(tensors, "send")
        check([tensor], "send")
        begun = self.ready().begin_send(raw(tensor), to, tag)
        return self.settle_later(begun, GroupWork("send", [tensor], self.limit_s), begun.result)

    def recv(self, tensors: Any, source: int, tag: int) -> GroupWork:
        """Begin to receive one tensor; the `source_rank` of the work is the rank that sent it."""
        tensor = single(tensors, "recv")
        check([tensor], "recv")
        check_writable([tensor], "recv")
        into = contiguous(tensor)
        begun = self.ready().begin_recv(raw(into), source, tag)

        def receipt() -> int:
            found = begun.result()
            if into is not tensor:
                tensor.detach().copy_(into)
            return found

        return self.settle_later(begun, GroupWork("recv", [tensor], self.limit_s), receipt)

    def close(self) -> None:
        """End the thread, once the messenger has ended what still waited."""
        if self._receipts is not None:
            self._receipts.close()

    def ready(self) -> Messenger:
        """The messenger. Raises UsageError if the group has none."""
        if self._messenger is None:
            raise UsageError("this group has no channels for messages between two ranks")
        with self._starting:
            self._receipts = self._receipts or WorkThread(self._name)
        return self._messenger

    def settle_later(self, begun: Future[int], work: GroupWork, receipt: Callable[[], int]) -> GroupWork:
        """Have `work` over once the message is; `receipt` makes an end of it, and returns its source."""

        def receive(begun: Future[int]) -> None:
            assert self._receipts is not None
            try:
                self._receipts.begin(receipt, work)
            except UsageError as closed:
                work.settle(begun.exception() or closed)

        # Not in the thread that says so: it polls for this rank, and a user's callback may take long.
        begun.add_done_callback(receive)
        return work


def single(tensors: Any, call: str) -> Tensor:
    """The one tensor of a message. Raises UsageError if there are more."""
    found = listed(tensors)
    if len(found) != 1:
        raise UsageError(f"{call} takes one tensor, it was given {len(found)}")
    return found[0]
