"""Who may read the page."""

from __future__ import annotations

import pytest

from bml.web.access import CSP, refusal

TOKEN = "t0ken"


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "127.0.0.1"])
def test_a_browser_of_this_machine_with_the_token(host: str) -> None:
    assert refusal(host, None, TOKEN, TOKEN) == ""
    assert refusal(host, f"http://{host}", TOKEN, TOKEN) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "192.168.0.7:8080",
        "",
        "localhost:8080@evil",
        "127.0.0.1:",
    ],
)
def test_a_page_whose_name_was_bound_to_this_machine(host: str) -> None:
    assert "this machine alone" in refusal(host, None, TOKEN, TOKEN)


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1:8080", ""]
)
def test_another_page_that_knows_the_token(origin: str) -> None:
    assert "another page" in refusal("127.0.0.1:8080", origin, TOKEN, TOKEN)


@pytest.mark.parametrize("given", ["", "t0ke", "t0ken ", "T0KEN", "ü"])
def test_without_the_token(given: str) -> None:
    assert "token is missing or wrong" in refusal("127.0.0.1:8080", None, given, TOKEN)


def test_nothing_from_elsewhere_and_nothing_inline_runs() -> None:
    assert "default-src 'none'" in CSP
    assert "unsafe" not in CSP
    assert "*" not in CSP
