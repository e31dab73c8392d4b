"""The thread in which a server that joins takes part in steps over shared memory, until it contributes.

The user's thread has the training state, or waits for it, and the loop's must not wait for anybody. Over tcp
no such thread is needed: there the loop moves every frame.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from bml.cluster.steps.direct import DirectSync
from bml.protocol.server.events import Submit
from bml.topology.errors import BmlError, FabricError
from bml.train.communicator import Committed


class Follower:
    """Follows the steps that it is told of, one after the other; `keep` gets the results.

    `fail` is told, once, why no more can be followed.
    """

    def __init__(
        self,
        direct: DirectSync,
        keep: Callable[[Committed], None],
        fail: Callable[[BmlError], None],
    ):
        self._direct = direct
        self._keep = keep
        self._fail = fail
        self._called: queue.SimpleQueue[Submit | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def called(self, submit: Submit) -> None:
        """Follow this step, after those before it. Returns at once."""
        if self._thread is None:
            name = f"bml-follows-{self._direct.server}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._called.put(submit)

    def close(self) -> None:
        """Follow no more; returns when the thread has ended. The job must be over for this server."""
        if self._thread is not None:
            self._called.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (submit := self._called.get()) is not None:
            try:
                kept = self._direct.follow(submit)
            except BmlError as error:
                self._fail(error)
                return
            except MemoryError as error:
                self._fail(FabricError(f"no memory to follow {submit.call.text}: {error}"))
                return
            if kept is not None:
                self._keep(kept)
