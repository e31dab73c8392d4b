"""The views that a server was in, for its report: when each came, and how long steps were interrupted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bml.protocol.wire.messages import View

_VIEWS_KEPT = 1024


@dataclass(frozen=True)
class ViewRecord:
    """A view as this server saw it; times are in seconds on the shell's clock.

    `recover_s` runs from the freeze to the first commit afterwards, None until there was one.
    """

    view: View
    frozen_at_s: float
    installed_at_s: float
    recover_s: float | None = None


class ViewHistory:
    """`records` are the newest views, and the first, which says how it began."""

    def __init__(self, now: float):
        self.records: list[ViewRecord] = []
        self._frozen_at = now

    def frozen(self, now: float) -> None:
        """The view in force is over."""
        self._frozen_at = now

    def installed(self, view: View, now: float) -> None:
        """The next one is in force."""
        if len(self.records) == _VIEWS_KEPT:
            del self.records[1]
        self.records.append(ViewRecord(view, self._frozen_at, now))

    def committed(self, now: float) -> None:
        """A step is committed: if it is the first in its view, recovery ends here."""
        if self.records and self.records[-1].recover_s is None:
            last = self.records[-1]
            self.records[-1] = replace(last, recover_s=now - last.frozen_at_s)
