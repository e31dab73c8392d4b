"""When a job must end because Ray's head is gone. Pure: what was seen is given, and when.

A head with Redis may come back, so its absence alone ends nothing. But Ray's own processes of a machine give
up after a while without it (`RAY_gcs_rpc_server_reconnect_timeout_s`, 60 s by default), and all actors of the
machine end with them. Servers must have written their checkpoints by then.

    state    event                                     becomes
    -------  ----------------------------------------  -------
    here     no answer                                 away
    away     an answer                                 here
    away     no answer, for `limit_s` in all           gone
    gone     anything                                  gone: servers are leaving

A head that answers late is slow, and not away: an answer is waited for as long as PATIENCE_S. Time in which
nobody looked, because this process was stopped or had no core, does not count: it says nothing of the head.
"""

from __future__ import annotations

from collections.abc import Mapping

SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The variable by which Ray's users set how long its processes do without a head, in seconds."""
RAYS_S = 60.0
"""Ray's default of it."""
PATIENCE_S = 5.0
"""How long an answer of the head is waited for."""
LOOK_S = 1.0
"""How often the head is looked for."""
_WAITS, _LEAVES = 0.4, 0.3
"""Of the time that Ray's processes wait, for how much the job waits for the head, and then the launcher for
the servers that leave. The rest is for closing the connection to Ray, which takes 5 s without a head."""
_SLACK_S = 2.0
"""So much later than planned a look may come, and the time before it still counts."""
_LONGEST_S = 2 * PATIENCE_S + _SLACK_S
"""A look may take so long: to connect, and to hear something. In a longer one this process was stopped."""


def rays_patience_s(environ: Mapping[str, str]) -> float:
    """How long Ray's processes do without a head, as set in this environment."""
    try:
        return max(1.0, float(environ.get(SETTING, RAYS_S)))
    except ValueError:
        return RAYS_S  # Ray takes no notice of it either


class Absence:
    """What is known of the head. `rays_s`: how long Ray's own processes do without it."""

    def __init__(self, rays_s: float):
        self.rays_s = rays_s
        self.limit_s = _WAITS * rays_s
        self.away_s = 0.0
        """For how long it has been away, in seconds."""
        self.why = ""
        """Why it did not answer when it was looked for last."""
        self.gone = False
        """Whether the job must end."""
        self._missed_at: float | None = None

    def answered(self) -> None:
        """It has answered."""
        if not self.gone:
            self.away_s, self.why, self._missed_at = 0.0, "", None

    def missed(self, why: str, began: float, now: float) -> None:
        """It has not, when it was asked at the time `began`."""
        since = began if self._missed_at is None else self._missed_at
        gap_s = began - since
        looked_s = min(now - began, _LONGEST_S)
        self.away_s += looked_s + (gap_s if gap_s <= LOOK_S + _SLACK_S else 0.0)
        self._missed_at, self.why = now, why
        self.gone |= self.away_s >= self.limit_s

    @property
    def leaves_s(self) -> float:
        """How long servers that leave may take, for the launcher to end before Ray ends it."""
        return _LEAVES * self.rays_s
