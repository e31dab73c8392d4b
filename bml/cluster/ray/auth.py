"""The token of a Ray that is started for one job: processes without it cannot use that Ray.

Ray listens on all interfaces of its machines, and every process that can call it can run code as its user. So
every Ray that is started here has a token of its own, which its processes get in their environment: the same
user (and root) can read it there, others cannot. If the user has set one of `SETTINGS`, that holds instead.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bml.cluster.ray import environment

_LOG = logging.getLogger(__name__)

SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""The variables by which Ray's users set its authentication."""
HOW_TO_GIVE = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token of the cluster, or RAY_AUTH_TOKEN_PATH to a "
    "file with it"
)
"""How a user gives the token of a cluster."""

_PROBE = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_get(b"bml doctor", None, timeout=2)
except AuthenticationError:
    print("authenticated")
else:
    print("open")
"""
_CONNECT_S = 1.0  # a head that is there answers a connection at once
_PROBE_S = 15.0  # a fresh interpreter imports Ray, on a busy machine


def own_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a new Ray: a fresh token, or nothing if the user has set its authentication."""
    if any(environ.get(name) for name in SETTINGS):
        return {}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextmanager
def private() -> Iterator[None]:
    """Give a Ray that is started inside of this context a token of its own.

    Afterwards the environment of this process is as before, so other processes that it starts do not know the
    token. This process itself uses the token until `forget`.
    """
    with environment.added(own_settings(os.environ)):
        forget()
        yield


def forget() -> None:
    """Let Ray in this process read its settings and its token again; only while it is not connected."""
    raylet: Any = importlib.import_module("ray._raylet")
    if not hasattr(raylet, "AuthenticationTokenLoader"):
        _LOG.warning("this version of Ray serves everyone who reaches it; 2.52 and newer ask for a token")
        return
    # In this order, so that a thread that reads a token meanwhile finds it where the settings are.
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def exposure(address: str) -> tuple[bool, str]:
    """Return whether the Ray cluster at host:port asks for its token, and a sentence about that.

    A process without a token asks the cluster, which takes about a second.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        return False, f"{address} cannot be asked: {error}"
    asks = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    asks["RAY_AUTH_MODE"] = "disabled"
    command = [sys.executable, "-P", "-c", _PROBE, address]
    try:
        done = subprocess.run(
            command, env=asks, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"{address} does not answer as a Ray cluster"
    if done.stdout.strip() == "authenticated":
        return True, f"{address} asks for its token"
    if done.stdout.strip() == "open":
        return False, (
            f"{address} asks for no token: everyone who reaches it can run code, and read a job's token"
        )
    return False, f"{address} does not answer as a Ray cluster"
