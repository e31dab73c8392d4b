"""The handshake: each side proves that it has the cluster's token, and which server of which job it is.

It is a mutual challenge-response. Pure: a handshake is a state machine, bytes in and bytes out, and random
numbers are its arguments. The acceptor sends a nonce. The dialer answers with its identity, the server that
it wants, the addresses of both ends as it sees them, a nonce of its own, and a MAC over all of that. The
acceptor proves itself in the same way. All three messages have fixed sizes, so nothing needs a length.

**What a proof covers.** It holds for one connection (the other side's nonce), one direction (its label), one
job, purpose and level, one server in one incarnation at each end, and one pair of addresses. The acceptor
checks each of them, and the dialer checks them again in the acceptor's proof. A relayed proof that was made
for another server is refused: a proof that a dialer sends to the address of a dead server is useless at a
living one.

**Addresses.** The proof covers the addresses of both ends as the socket has them, host and port. A listener
is bound to one address, which the other servers know, so without address translation both ends see the same.
With address translation they do not, and the handshake is refused for that reason. Heartbeats, which count
only from the address where their sender listens, could not work there either.

Bytes that travel afterwards are not authenticated or encrypted. The token keeps strangers and other jobs out;
it does not protect against an attacker that can rewrite the fabric's packets.
"""

from __future__ import annotations

import enum
import hmac
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple

from bml.topology.errors import UsageError
from bml.transport.handshake.datagram import VERSION
from bml.transport.interface import Endpoint

NONCE_NBYTES = 32
MAX_JOB_NBYTES = 64
HANDSHAKE_NBYTES = 512
"""No side of a handshake reads more bytes than this."""

_MAC_NBYTES = 32
_MAGIC = b"BMLh"
# magic, version, reserved, nonce
_CHALLENGE = struct.Struct(f">4sBB{NONCE_NBYTES}s")
# magic, version, code, role, job length, level, server, incarnation, job, nonce, the other's server and
# incarnation, address of the dialer's end and of the acceptor's
_IDENTITY = struct.Struct(f">4sBBBBHIQ{MAX_JOB_NBYTES}s{NONCE_NBYTES}sIQ18s18s")
_PREFIX = _MAGIC + bytes([VERSION])
_IPV4_MAPPED = bytes(10) + b"\xff\xff"


class Role(enum.IntEnum):
    """The purpose of a connection."""

    DATA = 0
    CONTROL = 1
    PROBE = 2
    """A test whether the path of a data connection works; made to the port of data connections."""


_PORT = {Role.DATA: Role.DATA, Role.CONTROL: Role.CONTROL, Role.PROBE: Role.DATA}
"""Role of a connection -> role of the port that it is made to."""


class Hello(NamedTuple):
    """The identity of one side of a connection; `level` is 0 on control connections.

    `incarnation` numbers the runs of a server that came later than the others, or again; 0 is the first.
    """

    role: Role
    job: bytes
    server: int
    level: int
    incarnation: int = 0


@dataclass(frozen=True)
class Identity:
    """A process of a job, as it proves itself in every handshake and seals its heartbeats.

    `token` is the cluster's secret; `job` is the job's id, of at most `MAX_JOB_NBYTES` bytes; `server` is the
    process's number in the job and `incarnation` numbers its own. Raises UsageError for an empty token, and
    for a job id that is empty or too long.
    """

    token: bytes = field(repr=False)
    job: bytes
    server: int
    incarnation: int = 0

    def __post_init__(self) -> None:
        check_token(self.token)
        job_bytes(self.job)

    @classmethod
    def of(cls, token: bytes, job: str | bytes, server: int, incarnation: int = 0) -> Identity:
        """The same, of a job id that may be a text."""
        return cls(token, job_bytes(job), server, incarnation)

    def hello(self, role: Role, level: int = 0) -> Hello:
        """The hello of this process on a connection of this role, over its NIC of `level`."""
        return Hello(role, self.job, self.server, level, self.incarnation)


class Refusal(enum.IntEnum):
    """The reason why an acceptor refuses a dialer; OK if it does not."""

    OK = 0
    VERSION = 1
    TOKEN = 2
    JOB = 3
    ROLE = 4
    SERVER = 5
    INCARNATION = 6
    ADDRESS = 7


_REFUSAL_TEXT = {
    Refusal.VERSION: "the other side speaks another version of the handshake",
    Refusal.TOKEN: "wrong token",
    Refusal.JOB: "wrong job",
    Refusal.ROLE: "this port is for another kind of connection, or another level",
    Refusal.SERVER: "another server was wanted than the one that listens there",
    Refusal.INCARNATION: "the server that listens there was wanted in another incarnation",
    Refusal.ADDRESS: "the two ends see different addresses, as if a process relays or translates them",
}


def job_bytes(job: str | bytes) -> bytes:
    """Return a job id as it travels; raises UsageError if it is empty or too long."""
    encoded = job.encode() if isinstance(job, str) else bytes(job)
    if not 0 < len(encoded) <= MAX_JOB_NBYTES:
        raise UsageError(f"job id of {len(encoded)} bytes, give 1 to {MAX_JOB_NBYTES}: {job!r}")
    return encoded


def check_token(token: bytes) -> bytes:
    """Return the token; raises UsageError if it is empty."""
    if not token:
        raise UsageError("the cluster's token is empty; give at least 16 random bytes")
    return token


class _Claim(NamedTuple):
    """The content of a proof: the side's own identity, the other side's, and the addresses of both ends."""

    me: Hello
    to_server: int
    to_incarnation: int
    ends: bytes
    """The address of the dialer's end and of the acceptor's, packed."""


class _Handshake:
    """The common part of both sides: it collects messages of fixed sizes, and checks their prefix early."""

    def __init__(self, token: bytes, me: Hello, nonce: bytes) -> None:
        if len(nonce) != NONCE_NBYTES:
            raise UsageError(f"nonce of {len(nonce)} bytes, give {NONCE_NBYTES} random ones")
        self._token = check_token(token)
        self._me = me
        self._nonce = nonce
        self._ends = b""
        self._buffer = b""
        self._expected = 0
        self.done = False
        """Whether the other side has proved itself; then `peer` is its hello."""
        self.error = ""
        """The reason why the connection must be closed, after sending what `feed` returned; empty if none."""
        self.peer: Hello | None = None

    @property
    def wants_nbytes(self) -> int:
        """The most bytes to read next, as later bytes belong to the frames; 0 when it is over."""
        return 0 if self.done or self.error else self._expected - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take up to `wants_nbytes` bytes; return the bytes to send. Then look at `done` and `error`."""
        if self.done or self.error or len(data) > self.wants_nbytes:
            self.error = self.error or "more bytes than a handshake has"
            return b""
        self._buffer += data
        if self._buffer[: len(_PREFIX)] != _PREFIX[: len(self._buffer)]:
            return self._bad_prefix()
        if len(self._buffer) < self._expected:
            return b""
        message, self._buffer = self._buffer, b""
        return self._take(message)

    def _bad_prefix(self) -> bytes:
        if self._buffer.startswith(_MAGIC):
            return self._refuse(Refusal.VERSION)
        self.error = f"not a handshake of ours, it starts with {self._buffer[:16]!r}"
        return b""

    def _take(self, message: bytes) -> bytes:
        raise NotImplementedError

    def _refuse(self, code: Refusal) -> bytes:
        self.error = _REFUSAL_TEXT[code]
        return b""

    def _mac(self, label: bytes, challenge: bytes, *messages: bytes) -> bytes:
        return hmac.digest(self._token, b"bml " + label + challenge + b"".join(messages), "sha256")


class AcceptorHandshake(_Handshake):
    """The listening side; a dialer must want exactly the server, incarnation, job and level of `me`."""

    def start(self, here: Endpoint, there: Endpoint) -> bytes:
        """Return the challenge to send first. `here` is this side's address and `there` the dialer's."""
        self._ends = _packed(there) + _packed(here)
        self._expected = _IDENTITY.size + _MAC_NBYTES
        self._challenge = _CHALLENGE.pack(_MAGIC, VERSION, 0, self._nonce)
        return self._challenge

    def _take(self, message: bytes) -> bytes:
        identity, mac = message[: _IDENTITY.size], message[_IDENTITY.size :]
        if not hmac.compare_digest(mac, self._mac(b"dialer", self._challenge, identity)):
            return self._refuse(Refusal.TOKEN)
        claim = _unpack_identity(identity)
        refusal = Refusal.ROLE if claim is None else self._judge(claim)
        if claim is None or refusal is not Refusal.OK:
            return self._refuse(refusal)
        self.peer = claim.me
        self.done = True
        proof = _Claim(self._me, self.peer.server, self.peer.incarnation, self._ends)
        answer = _pack_identity(proof, Refusal.OK, bytes(NONCE_NBYTES))
        return answer + self._mac(b"acceptor", self._challenge, message, answer)

    def _judge(self, claim: _Claim) -> Refusal:
        """Return why a dialer that has the token is refused all the same; OK if it is not."""
        peer, me = claim.me, self._me
        if peer.job != me.job:
            return Refusal.JOB
        if peer.level != me.level or _PORT[peer.role] is not me.role:
            return Refusal.ROLE
        if claim.to_server != me.server:
            return Refusal.SERVER
        if claim.to_incarnation != me.incarnation:
            return Refusal.INCARNATION
        return Refusal.OK if claim.ends == self._ends else Refusal.ADDRESS

    def _refuse(self, code: Refusal) -> bytes:
        # The dialer is told the reason, so that a person can correct the mistake.
        self.error = _REFUSAL_TEXT[code]
        empty = _Claim(Hello(self._me.role, b"", 0, 0), 0, 0, b"")
        return _pack_identity(empty, code, bytes(NONCE_NBYTES)) + bytes(_MAC_NBYTES)


class DialerHandshake(_Handshake):
    """The dialing side; it wants to reach `server` in this `incarnation`, and no other process."""

    def __init__(self, token: bytes, me: Hello, nonce: bytes, server: int, incarnation: int = 0) -> None:
        super().__init__(token, me, nonce)
        self._wanted = me._replace(role=_PORT[me.role], server=server, incarnation=incarnation)
        self._challenge = b""
        self._sent = b""

    def start(self, here: Endpoint, there: Endpoint) -> bytes:
        """Return the bytes to send first: none, as the acceptor begins. `here` is this side's address."""
        self._ends = _packed(here) + _packed(there)
        self._expected = _CHALLENGE.size
        return b""

    def _take(self, message: bytes) -> bytes:
        if self._sent:
            self._check_answer(message)
            return b""
        self._challenge = message
        claim = _Claim(self._me, self._wanted.server, self._wanted.incarnation, self._ends)
        identity = _pack_identity(claim, Refusal.OK, self._nonce)
        self._sent = identity + self._mac(b"dialer", self._challenge, identity)
        self._expected = _IDENTITY.size + _MAC_NBYTES
        return self._sent

    def _check_answer(self, message: bytes) -> None:
        identity, mac = message[: _IDENTITY.size], message[_IDENTITY.size :]
        code = identity[5]
        if code != Refusal.OK:
            text = _REFUSAL_TEXT[Refusal(code)] if code in _REFUSAL_TEXT else f"code {code}"
            self.error = f"refused by the other side: {text}"
            return
        if not hmac.compare_digest(mac, self._mac(b"acceptor", self._challenge, self._sent, identity)):
            self.error = "the other side does not have the token"
            return
        claim, wanted, me = _unpack_identity(identity), self._wanted, self._me
        if claim is None or claim.me._replace(server=wanted.server, incarnation=wanted.incarnation) != wanted:
            self.error = "the other side answered as another job, role or level"
        elif claim.me.server != wanted.server:
            self.error = f"server {claim.me.server} answered instead of server {wanted.server}"
        elif claim.me.incarnation != wanted.incarnation:
            self.error = f"server {wanted.server} answered in another incarnation"
        elif (claim.to_server, claim.to_incarnation) != (me.server, me.incarnation):
            self.error = "the other side answered another server"
        elif claim.ends != self._ends:
            self.error = _REFUSAL_TEXT[Refusal.ADDRESS]
        else:
            self.peer = claim.me
            self.done = True


def _pack_identity(claim: _Claim, code: Refusal, nonce: bytes) -> bytes:
    who, to_server, to_incarnation, ends = claim
    head = (
        _MAGIC,
        VERSION,
        code,
        who.role,
        len(who.job),
        who.level,
        who.server,
        who.incarnation,
        who.job,
        nonce,
    )
    return _IDENTITY.pack(*head, to_server, to_incarnation, ends[:18], ends[18:])


def _unpack_identity(identity: bytes) -> _Claim | None:
    (
        _,
        _,
        _,
        role,
        job_nbytes,
        level,
        server,
        incarnation,
        job,
        _,
        to_server,
        to_incarnation,
        dialer,
        acceptor,
    ) = _IDENTITY.unpack(identity)
    if role not in tuple(Role) or job_nbytes > MAX_JOB_NBYTES or any(job[job_nbytes:]):
        return None
    me = Hello(Role(role), job[:job_nbytes], server, level, incarnation)
    return _Claim(me, to_server, to_incarnation, dialer + acceptor)


def _packed(endpoint: Endpoint) -> bytes:
    """Address and port in 18 bytes."""
    host, port = endpoint
    return _packed_host(host) + port.to_bytes(2, "big")


@lru_cache(256)
def _packed_host(host: str) -> bytes:
    """An address in 16 bytes, without the scope of a link-local one, which differs between hosts."""
    address = ip_address(host.partition("%")[0]).packed
    return _IPV4_MAPPED + address if len(address) == 4 else address
