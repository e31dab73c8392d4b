"""All that a server must be given to go on where others are, or were: the whole state of a session.

It is made, and taken over, at the boundaries of training loops alone: for a server that joins, and for
checkpoints. A job that goes on from a checkpoint takes it as a joiner does. Its loops before the place of the
checkpoint end at once, but its calls outside of loops are made, as all servers make them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bml.errors import BmlError
from bml.topology.errors import UsageError
from bml.train.balancing.balancer import Balancer
from bml.train.calls import warn_user
from bml.train.collectives import Collectives
from bml.train.keeping.files import Files, why
from bml.train.keeping.keeper import Keeper, check_number
from bml.train.keeping.parts import Key
from bml.train.keeping.resuming import Resumed, check_lineage
from bml.train.ledgers import Ledgers
from bml.train.snapshot import Manifest, Snapshot, manifest_of, restore, snapshot
from bml.train.state import OTHERS, NamedState


class WholeState:
    """Named values, ledgers, weights and checkpoints of a session; `given`: what it is to take over."""

    def __init__(self, collectives: Collectives):
        self.named = NamedState()
        self.ledgers = Ledgers()
        self.balancer = Balancer(collectives)
        self.given: memoryview | None = None
        self.resumed: Key | None = None
        """The checkpoint with which this job goes on."""
        self.keeper: Keeper | None = None
        self._collectives = collectives

    def join(self, data: memoryview) -> None:
        """Go to where the others are: this server joins, and was given their state."""
        self.given, self.resumed = data, None
        self._collectives.position.go_to(manifest_of(data).path)

    def resume(self, resumed: Resumed) -> None:
        """Go to where a checkpoint was made, and take it there; before the first loop."""
        self.given, self.resumed = resumed.data, resumed.key
        self._collectives.position.go_to(
            manifest_of(resumed.data).path, "the checkpoint is", may_be_longer=True
        )

    def keep(self, files: Files, every: int, keep: int) -> Callable[[], dict[str, Any]]:
        """Make checkpoints, and return a function that says what is known of them.

        Raises UsageError for numbers out of range, and for a folder of another job.
        """
        check_number("every", every)
        check_number("keep", keep)
        communicator = self._collectives.communicator
        self.close()
        self.keeper = Keeper(self._collectives, files, every, keep)
        if not communicator.joins:
            try:
                check_lineage(files, communicator.job, self.resumed)
            except OSError as error:
                raise UsageError(f"checkpoints cannot be written to {files}: {why(error)}") from error
            try:
                self.keeper.writer.claim(communicator.job)
            except OSError as error:  # the disk may come back
                self.keeper.writer.fail(f"server {communicator.server} cannot write to {files}: {why(error)}")
        if self.resumed is not None:
            self.keeper.resume(self.resumed.steps)
        return self.keeper.writer.shown

    def prepare(self) -> None:
        """Make ready for checkpoints, as it is known now what the state is."""
        if self.keeper is not None:
            self.keeper.writer.prepare(len(self.snapshot()) // self._collectives.n_servers + 1)

    def pass_on(self) -> None:
        """Give joiners the state. A server that was asked to leave ends here, perhaps as all others do."""
        communicator = self._collectives.communicator
        try:
            communicator.boundary(self.snapshot)
        except BmlError as error:
            if communicator.leaves and (text := self._leave()):
                error.args = (f"{error}; {text}", *error.args[1:])
            raise

    def settle(self) -> None:
        """Wait until nothing is being written."""
        if self.keeper is not None:
            self.keeper.writer.settle()

    def close(self) -> None:
        """Wait until nothing is being written, and end the thread that writes."""
        if self.keeper is not None:
            self.keeper.writer.close()

    def snapshot(self) -> Snapshot:
        """The whole state, without a copy: read it before it changes."""
        collectives = self._collectives
        return snapshot(
            self.named,
            collectives.position.path,
            collectives.contributors,
            self.ledgers.dump(),
            self.balancer.dump(),
            collectives.wants_state,
            collectives.newest,
            collectives.first_step,
            self.keeper.dump() if self.keeper else b"",
            collectives.position.over,
            collectives.throughput.counted(),
        )

    def take(self) -> None:
        """Take over what was given.

        Raises UsageError if this program names other values, or has made a loop longer that was over.
        """
        assert self.given is not None
        manifest = restore(self.given, self.named, "the checkpoint has" if self.resumed else OTHERS)
        self.given = None
        self.named.is_new = False  # it is equal on all servers
        self.ledgers.load(manifest.ledgers)
        self._collectives.position.check_passed(manifest.over)
        self.balancer.load(manifest.shares)
        if self.resumed is not None:
            collectives = self._collectives
            collectives.go_on_from(manifest.steps, manifest.steps - collectives.newest)
        else:
            self._follow(manifest)

    def _follow(self, manifest: Manifest) -> None:
        """Decide from here on as the others do."""
        collectives = self._collectives
        collectives.has_begun = True
        collectives.contributors = manifest.contributors
        collectives.wants_state = manifest.wants_state
        collectives.go_on_from(manifest.steps, manifest.first_step)
        collectives.throughput.go_on_from(manifest.counted)
        if self.keeper is not None and manifest.keeping:
            self.keeper.load(manifest.keeping)

    def _leave(self) -> str:
        """This server leaves at this boundary: it writes the state, if the job makes checkpoints.

        Returns why the state is not kept; empty if it is, or need not be.
        """
        if self.keeper is None or not self.keeper.leave(self.snapshot):
            return ""
        text = f"the state with which server {self._collectives.communicator.server} left is not kept: "
        warn_user(text := text + self.keeper.writer.error)
        return text
