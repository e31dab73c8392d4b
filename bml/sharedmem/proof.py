"""The proof, in memory that a server shows, that it has the cluster's token and is who it says."""

from __future__ import annotations

import hmac

PROOF_NBYTES = 32


def proof_of(token: bytes, what: str, job: str, server: int, address: tuple[object, ...]) -> bytes:
    """The `PROOF_NBYTES` bytes that `server` shows in its `what` of this job, which lies at `address`."""
    said = f"bml {what} {job} {server} {' '.join(map(str, address))}"
    return hmac.digest(token, said.encode(), "sha256")


def proves(shown: bytes, token: bytes, what: str, job: str, server: int, address: tuple[object, ...]) -> bool:
    """Whether that is what is shown."""
    return hmac.compare_digest(shown, proof_of(token, what, job, server, address))
