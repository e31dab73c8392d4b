"""Asks the actors of servers, and takes the answers that come in time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from bml.cluster.fleets.fleet import Answers, Patience
from bml.cluster.spec.job import Request

DEATHS = (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError)
"""The errors that Ray raises for a dead actor, if they are not ActorUnavailableError. For an actor that was
killed because its machine ran out of memory there is a class of its own."""


def ask_actors(actors: Mapping[int, Any], request: Request, patience: Patience) -> Answers:
    """Ask the actors of these servers; one that dies of a fault may take its answer with it."""
    begun_s = time.monotonic()
    asked = {actor.answer.remote(request, max(patience)): server for server, actor in actors.items()}
    answers: dict[int, dict[str, Any]] = {}
    while asked:
        left_s = patience.left_s(answers, time.monotonic() - begun_s)
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=left_s)
        if not ready:
            break
        server = asked.pop(ready[0])
        try:
            answer = ray.get(ready[0])
        except ActorUnavailableError:
            continue
        except DEATHS:
            answer = {"done": f"server {server} died of it"} if request[0] == "inject" else None
        except RayError:
            continue
        if answer is not None:
            answers[server] = answer
    return answers
