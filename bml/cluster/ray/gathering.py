"""Waits until Ray has placed enough actors of servers for the job to begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from bml.cluster.fleets.start_quorum import StartQuorum
from bml.cluster.spec.job import Contact, JobSpec
from bml.errors import StartError


def gather(
    spec: JobSpec, actors: Mapping[int, Any], contact_of: Callable[[int, float], Contact]
) -> dict[int, Contact]:
    """Return the addresses of the servers with which the job begins (see StartQuorum). Raises StartError.

    `contact_of` returns those of a server that has answered, until a deadline on the clock of time.monotonic.
    """
    quorum = StartQuorum(spec.parsed_fabric(), spec.servers, spec.min_start, spec.start_s, time.monotonic())
    contacts: dict[int, Contact] = {}
    asked = {actor.contact.remote(): server for server, actor in actors.items()}
    while not quorum.begins(now := time.monotonic()):
        ready, _ = ray.wait(list(asked), num_returns=1, timeout=quorum.patience_s(now))
        for ref in ready:
            server = asked.pop(ref)
            try:
                contacts[server] = contact_of(server, now + quorum.patience_s(now))
            except StartError as error:
                quorum.failed(server, error)
            else:
                quorum.came(server, time.monotonic())
    return contacts
