"""Which part of a job is taken out by an early warning alone, from what all servers say. Time is an argument.

One server cannot know whether the others see the same. What most of them see at once is the network, or the
load, and none of their parts. So the launcher looks at all, and lets one part go at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

SETTLED_S = 3.0
"""A warning stands for so long before it counts: by then the others that see the same have warned, too."""
PAUSE_S = 30.0
"""After a part was taken out nothing else is for so long: warnings of before have ended by then."""


class Suspects:
    """The suspects of one job. With fewer servers than `least` it stops; None: without more than half."""

    def __init__(self, least: int | None):
        self._least = least
        self._taken_s = -inf

    def taken(self, now: float) -> None:
        """A part was taken out."""
        self._taken_s = now

    def candidates(self, answers: Mapping[int, Mapping[str, Any]], now: float) -> list[str]:
        """The parts of which one may be taken out now, the one that is warned of for longest first.

        `answers`: what each server says of its own parts (see Forecast.suspects).
        """
        said = {server: answer["suspects"] for server, answer in answers.items() if "suspects" in answer}
        if now - self._taken_s < PAUSE_S or any(answers[server]["leaves"] for server in said):
            return []
        least = len(said) // 2 + 1 if self._least is None else self._least
        warners: dict[str, set[int]] = {}
        troubled: dict[str, set[int]] = {}
        for server, warnings in said.items():
            for each in warnings:
                warners.setdefault(each["kind"], set()).add(server)
                if each["level"] is None:
                    troubled.setdefault(answers[server]["machine"], set()).add(server)
        found = []
        for server, warnings in said.items():
            beside = troubled.get(answers[server]["machine"], set())
            server_stays = len(beside) > 1 or len(said) - 1 < least
            for each in warnings:
                common = len(warners[each["kind"]]) * 2 > len(said)
                stays = server_stays if each["level"] is None else each["last"]
                if each["for_s"] >= SETTLED_S and not common and not stays:
                    found.append((-each["for_s"], server, each["part"]))
        return list(dict.fromkeys(part for _, _, part in sorted(found)))
