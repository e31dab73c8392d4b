"""The memory of a simulated server: the vectors of its step, and the results that it keeps as a learner.

Here the core's instructions about payloads are carried out, with real arithmetic on real arrays.
"""

from __future__ import annotations

from typing import NamedTuple

from bml.protocol.server import events as ev
from bml.protocol.server.core import ServerCore
from bml.protocol.server.kept_results import KeptResults
from bml.protocol.step.dataflow import Buffer, Place, Reduce
from bml.protocol.step.workspace import Array, Workspace
from bml.protocol.wire.call import neutral
from bml.protocol.wire.frame import Header
from bml.protocol.wire.messages import View
from bml.sim.judge.zero_copy import Reference, ZeroCopySender
from bml.sim.server.context import World
from bml.sim.server.sharing import Sharing
from bml.sim.server.user import User
from bml.sim.world.wires import Parcel


class KeptResult(NamedTuple):
    """The result of a step that a learner followed."""

    epoch: int
    contributors: tuple[int, ...]
    view: View
    result: Array


class Memory:
    """The memory of one `server`; `sharing` is None where servers send frames."""

    def __init__(
        self,
        server: int,
        world: World,
        core: ServerCore,
        user: User,
        keeps: KeptResults[KeptResult],
        sharing: Sharing | None,
    ):
        self._server = server
        self._world = world
        self._core = core
        self._user = user
        self._keeps = keeps
        self._sharing = sharing
        self._sender = ZeroCopySender(server)
        self._workspace: Workspace | None = None
        self._step_view: View | None = None

    # --- payloads --------------------------------------------------------------------------------

    def write(self, parcel: Parcel, place: Place) -> bool:
        """Put a payload in its place. Returns False if it was read in its sender's memory too late."""
        header = parcel.header
        if place.buffer == Buffer.STATE:
            self._user.state_bytes[place.offset : place.offset + header.nbytes] = parcel.payload
            return True
        assert self._workspace is not None
        assert parcel.reference is not None
        if not parcel.reference.good(self._server, header, parcel.payload) and self._world.zero_copy:
            return False
        self._workspace.view(place, header.stop - header.start)[:] = parcel.payload
        return True

    def read(self, header: Header, place: Place) -> tuple[bytes, Reference | None]:
        """The payload of a frame that goes out, and a reference to it where it lies."""
        if place.buffer == Buffer.STATE:
            return bytes(self._user.state_bytes[place.offset : place.offset + header.nbytes]), None
        assert self._workspace is not None
        lies = self._workspace.view(place, header.stop - header.start)
        return bytes(lies), self._sender.reference_for(lies)

    def fence(self) -> None:
        """References to this memory that are under way are void from now on."""
        self._sender.fences += 1

    # --- a step ----------------------------------------------------------------------------------

    def open(self, instruction: ev.Open) -> None:
        """Begin a try of a step, or go on with the elements that are not final."""
        step, follows, left = instruction.step, instruction.follows, instruction.left
        scratch_elements = instruction.scratch_elements
        self._step_view = self._core.view
        if left:
            assert self._workspace is not None
            text = f"server {self._server} goes on with {left} of step {step}"
            self._world.point("resume", text, self._server)
            self._workspace = self._workspace.resume(left, scratch_elements)
            return
        vector = self._user.contribution if follows is None else neutral(follows)
        assert vector is not None
        self._workspace = Workspace(vector, scratch_elements, "sum")
        if self._sharing is not None:
            assert self._step_view is not None
            members, result = self._step_view.members, self._workspace.result
            self._sharing.bring(step, vector, result, members, follows is not None)

    def reduce(self, instruction: Reduce) -> None:
        """Add."""
        assert self._workspace is not None
        self._workspace.reduce(instruction)

    def commit(self, instruction: ev.Commit) -> None:
        """The step is committed: the user gets its result."""
        step, epoch, contributors = instruction.step, instruction.epoch, instruction.contributors
        self._sender.committed = step
        self._user.take_back(step)
        view, result = self._take()
        self._user.committed(step, epoch, contributors, view, result)

    def _take(self) -> tuple[View, Array]:
        """The view and the result of the step, which is over."""
        assert self._workspace is not None
        assert self._step_view is not None
        if self._sharing is not None:
            self._sharing.take()
        result, self._workspace = self._workspace.result, None
        return self._step_view, result

    # --- results that a learner keeps ------------------------------------------------------------

    def keep(self, instruction: ev.BufferResult) -> None:
        """A followed step is committed: keep its result."""
        view, result = self._take()
        self._world.point("keep", f"server {self._server} keeps step {instruction.step}", self._server)
        kept = KeptResult(instruction.epoch, instruction.contributors, view, result)
        self._keeps.keep(instruction.step, kept)
        most_nbytes = self._world.settings.kept_nbytes
        self._world.promises.keeps(self._server, len(self._keeps.steps), result.nbytes, most_nbytes)
        self._user.kept()

    def skip(self, _: ev.DiscardResult) -> None:
        """A followed step is committed, and its result is of no use."""
        self._workspace = None

    def behind(self, instruction: ev.ResultsDropped) -> None:
        """Results from this step on are lost."""
        text = f"server {self._server} keeps no result from step {instruction.step} on"
        self._world.point("behind", text, self._server)
        self._keeps.behind(instruction.step)
        self._user.fall_behind()

    def replay(self, instruction: ev.Replay) -> None:
        """The user has come to a step that was kept for it."""
        kept = self._keeps.pop(instruction.step)
        self._user.committed(instruction.step, kept.epoch, kept.contributors, kept.view, kept.result)

    def state_complete(self, instruction: ev.StateComplete) -> None:
        """The training state after this step is whole."""
        self._keeps.here(instruction.step)
        self._user.state_complete(instruction.step, instruction.digests)

    def expect(self, instruction: ev.AllocateState) -> None:
        """Make room for the training state."""
        self._user.state_bytes = bytearray(instruction.nbytes)
