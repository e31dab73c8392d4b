"""Who may read the page of a job: a browser on this machine that was given the token."""

from __future__ import annotations

import hmac
import re

_NAMES = {"127.0.0.1", "localhost", "[::1]"}
_HOST = re.compile(r"(?P<name>\[[0-9a-f:]+\]|[a-z0-9.-]+)(?::(?P<port>[0-9]{1,5}))?", re.IGNORECASE)

CSP = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the token is in the address
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer: a page runs no other code than ours, and is in no frame of another page."""


def refusal(host: str, origin: str | None, given: str, token: str) -> str:
    """Say why a request is refused; "" if it is not.

    `host` and `origin` are headers. The name in `host` must be one of this machine: else a page of a domain
    whose address was changed to 127.0.0.1 could ask (DNS rebinding). The port may be that of a tunnel.
    """
    found = _HOST.fullmatch(host)
    if found is None or found["name"].lower() not in _NAMES:
        return "this page is for this machine alone: open http://127.0.0.1:PORT, perhaps through a tunnel"
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return "another page has asked for this one"
    if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode()):
        return "the token is missing or wrong: open the address that the command printed"
    return ""
