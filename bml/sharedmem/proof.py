"""The proof, in a page that a server shows, that it has the cluster's token and which server it is."""

from __future__ import annotations

import hmac

PROOF_NBYTES = 32


def proof_of(token: bytes, what: str, job: str, server: int, address: tuple[object, ...]) -> bytes:
    """The MAC of `PROOF_NBYTES` bytes that `server` of `job` shows in its page, which lies at `address`.

    `what` is the kind of the page.
    """
    said = f"bml {what} {job} {server} {' '.join(map(str, address))}"
    return hmac.digest(token, said.encode(), "sha256")


def proves(shown: bytes, token: bytes, what: str, job: str, server: int, address: tuple[object, ...]) -> bool:
    """Whether `shown` is the proof of such a page."""
    return hmac.compare_digest(shown, proof_of(token, what, job, server, address))
