"""A Ray that only records its calls, and records of servers that tests of fleets make."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bml.cluster.fleets.handles import ProcessId
from bml.cluster.spec.job import Contact, JobSpec, ServerReport

SPEC = JobSpec("bcube:2x1", transport="tcp")
NOBODY = ProcessId(1 << 30, 0)
KILLED = "its process was killed by signal 9"


def contact(server: int) -> Contact:
    return Contact(server, ("127.0.0.1", 1), (("127.0.0.1", 2),))


def report(server: int) -> ServerReport:
    return ServerReport(server, "done", 7, "", "NoneType", "", "", None, [], {})


class Actor:
    def __init__(self, ray: FakeRay, kind: str) -> None:
        self.ray, self.kind = ray, kind

    def __getattr__(self, name: str) -> Any:
        return Call(self.ray, self.kind, name)


class Call:
    def __init__(self, ray: FakeRay, kind: str, name: str) -> None:
        self.ray, self.kind, self.name = ray, kind, name

    def remote(self, *arguments: Any) -> int:
        self.ray.calls.append((self.kind, self.name, arguments))
        return Ref(len(self.ray.calls) - 1)


class Ref(int):
    """A call; as with Ray's client, those that Ray gives out are equal, and not the same object."""


class Maker:
    def __init__(self, ray: FakeRay, kind: str) -> None:
        self.ray, self.kind = ray, kind

    def options(self, **options: Any) -> Maker:
        return self

    def remote(self, *arguments: Any) -> Actor:
        name = f"{self.kind} {arguments[1]}" if self.kind == "ServerActor" else self.kind
        self.ray.calls.append((name, "new", arguments))
        return Actor(self.ray, name)


class FakeRay:
    """Actors that only note what they are asked; `answer` says what they answer, by the name of the call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.answers: dict[tuple[str, str], Any] = {}
        self.puts: list[Any] = []
        self.free: dict[str, float] = {}
        self.draining: dict[str, int] = {}

    def is_initialized(self) -> bool:
        return True

    def remote(self, kind: type) -> Maker:
        return Maker(self, kind.__name__)

    def wait(self, refs: list[int], num_returns: int = 1, timeout: float = 0.0) -> Any:
        ready = [Ref(ref) for ref in refs if self.calls[ref][:2] in self.answers][:num_returns]
        if not ready:
            time.sleep(min(timeout, 0.01))
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: int, timeout: float | None = None) -> Any:
        answer = self.answers[self.calls[ref][:2]]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def put(self, value: Any) -> Any:
        self.puts.append(value)
        return ("put", value)

    def available_resources(self) -> dict[str, float]:
        return self.free

    def cluster_resources(self) -> dict[str, float]:
        return self.free

    def kill(self, actor: Actor) -> None:
        self.calls.append((actor.kind, "killed", ()))

    def asked(self, kind: str, name: str) -> list[tuple[Any, ...]]:
        return [arguments for *called, arguments in self.calls if called == [kind, name]]


def unavailable() -> Exception:
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the connection broke", None)


def said(heartbeats: int, term: int = 1) -> Any:
    from bml.cluster.ray.actors import Said

    return Said([{"term": term, "state": "steady", "highest": term}], NOBODY, heartbeats, False)


def waits(fleet: Any, until: Callable[[], object]) -> list[Any]:
    """What happens to servers until then."""
    return waits_for(fleet, lambda events: until())


def waits_for(fleet: Any, until: Callable[[list[Any]], object]) -> list[Any]:
    deadline, events = time.monotonic() + 10, list[Any]()
    while not until(events):
        assert time.monotonic() < deadline
        events += [each for each in fleet.wait(0.01) if not hasattr(each, "snapshot")]
    return events
