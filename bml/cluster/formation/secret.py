"""The secret of a group: a process that does not have it can read the store, and is not believed.

All that reaches the store reads the job's token there. Where the ranks have BML_SECRET, the token with which
they prove themselves is made of both, and the secret stands in no store and in no argument of a command.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from bml.cluster.spec.job import JobSpec
from bml.errors import UsageError

SECRET = "BML_SECRET"
_LEAST = 16
"""Characters: what passes on the network shows a guess to be right, so it must not be guessed."""


class Secret:
    """What BML_SECRET says, perhaps nothing. Raises UsageError for a text that is too short."""

    def __init__(self, environ: Mapping[str, str]):
        self._text = environ.get(SECRET, "").encode("utf-8", "surrogateescape")
        if 0 < len(self._text) < _LEAST:
            raise UsageError(
                f"{SECRET} has {len(self._text)} characters: give {_LEAST} or more that nobody can guess, "
                "such as those of `openssl rand -hex 32`"
            )

    def mark(self, spec: JobSpec) -> bytes:
        """What all may see, and only who has the secret can make; empty without one."""
        said = b"bml group" + msgspec.json.encode(spec)  # all of it: the store is open to strangers
        return hmac.digest(self._text, said, "sha256") if self._text else b""

    def check(self, mark: bytes, spec: JobSpec) -> None:
        """Raise UsageError unless `mark` is that of rank 0 with the same secret, or both have none."""
        if hmac.compare_digest(mark, self.mark(spec)):
            return
        if not self._text:
            raise UsageError(f"rank 0 has a {SECRET} and this rank has none: set the same for every rank")
        if not mark:
            raise UsageError(f"this rank has a {SECRET} and rank 0 has none: set the same for every rank")
        raise UsageError(f"the {SECRET} of this rank is not that of rank 0: set the same for every rank")

    def mixed_into(self, spec: JobSpec) -> JobSpec:
        """The job with the token with which its ranks prove themselves."""
        if not self._text:
            return spec
        return replace(spec, token=hmac.digest(self._text, b"bml token" + spec.token, "sha256"))
