"""The record of a step while it is synchronised: its engine, its barrier, and the elements that are final."""

from __future__ import annotations

from dataclasses import dataclass

from bml.protocol.server.events import Submit
from bml.protocol.step.barrier import Barrier
from bml.protocol.step.exchange import AnyEngine
from bml.protocol.step.spans import Spans, merged, missing, placed


@dataclass
class RunningStep:
    """The step that is being synchronised."""

    submit: Submit
    contributors: tuple[int, ...]
    engine: AnyEngine
    barrier: Barrier
    stamp: tuple[int, int]
    """(epoch, step), as all its frames have it."""
    follows: bool
    left: Spans
    """The elements that this try reduces: all, unless some were final before."""
    entered: bool = False

    @property
    def final(self) -> Spans:
        """The elements that are final."""
        before = missing(self.left, self.submit.n_elements)
        return merged((*before, *placed(self.engine.finals, self.left)))
