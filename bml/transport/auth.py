"""Who may talk: a mutual challenge-response over the cluster's token, and sealed heartbeats.

Pure: a handshake is a state machine, bytes in and bytes out, and random numbers are its arguments. The
acceptor sends a nonce; the dialer answers with who it is, a nonce of its own and a MAC over all of it; the
acceptor proves itself in the same way. All three messages have fixed sizes, so nothing needs a length.
What travels afterwards is not authenticated or encrypted: the token keeps strangers and other jobs out, it
does not protect against somebody who can rewrite the fabric's packets.
"""

from __future__ import annotations

import enum
import hmac
import struct
from typing import NamedTuple

from topology.errors import UsageError

VERSION = 2
NONCE_NBYTES = 32
MAX_JOB_NBYTES = 64
HANDSHAKE_NBYTES = 512
"""No side of a handshake reads more than this."""

_MAC_NBYTES = 32
_MAGIC = b"BMLh"
# magic, version, reserved, nonce
_CHALLENGE = struct.Struct(f">4sBB{NONCE_NBYTES}s")
# magic, version, code, role, job length, level, server, life, job, nonce
_IDENTITY = struct.Struct(f">4sBBBBHIQ{MAX_JOB_NBYTES}s{NONCE_NBYTES}s")
_PREFIX = _MAGIC + bytes([VERSION])

_BEAT_MAGIC = b"BMLb"
_BEAT_MAC_NBYTES = 16
# magic, version, reserved, level, from server, to server, sequence number
_BEAT = struct.Struct(">4sBBHIIQ")
BEAT_NBYTES = _BEAT.size + _BEAT_MAC_NBYTES


class Role(enum.IntEnum):
    """What a connection is for."""

    DATA = 0
    CONTROL = 1


class Hello(NamedTuple):
    """Who one side of a connection is; `level` is 0 on control connections.

    `life` numbers the lives of a server that came later than the others, or again; 0 is the first.
    """

    role: Role
    job: bytes
    server: int
    level: int
    life: int = 0


class Refusal(enum.IntEnum):
    """Why an acceptor refuses; OK if it does not."""

    OK = 0
    VERSION = 1
    TOKEN = 2
    JOB = 3
    ROLE = 4


_REFUSAL_TEXT = {
    Refusal.VERSION: "the other side speaks another version of the handshake",
    Refusal.TOKEN: "wrong token",
    Refusal.JOB: "wrong job",
    Refusal.ROLE: "not the kind of connection, or not the level, that this port is for",
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


class _Handshake:
    """What both sides share: collect fixed-size messages, fail early on a wrong prefix."""

    def __init__(self, token: bytes, me: Hello, nonce: bytes) -> None:
        if len(nonce) != NONCE_NBYTES:
            raise UsageError(f"nonce of {len(nonce)} bytes, give {NONCE_NBYTES} random ones")
        self._token = check_token(token)
        self._me = me
        self._nonce = nonce
        self._buffer = b""
        self._expected = 0
        self.done = False
        """The other side proved itself; `peer` says who it is."""
        self.error = ""
        """Why the connection must be closed (after sending what `feed` returned); empty if all is well."""
        self.peer: Hello | None = None

    @property
    def wants_nbytes(self) -> int:
        """How many bytes to read next, at most: what comes after them belongs to the frames. 0 = none."""
        return 0 if self.done or self.error else self._expected - len(self._buffer)

    def feed(self, data: bytes) -> bytes:
        """Take up to `wants_nbytes` bytes; return what to send. Look at `done` and `error` afterwards."""
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
    """The listening side; `me` says what it listens for, and a dialer must match role, job and level."""

    def start(self) -> bytes:
        """Return the challenge to send first."""
        self._expected = _IDENTITY.size + _MAC_NBYTES
        self._challenge = _CHALLENGE.pack(_MAGIC, VERSION, 0, self._nonce)
        return self._challenge

    def _take(self, message: bytes) -> bytes:
        identity, mac = message[: _IDENTITY.size], message[_IDENTITY.size :]
        if not hmac.compare_digest(mac, self._mac(b"dialer", self._challenge, identity)):
            return self._refuse(Refusal.TOKEN)
        peer = _unpack_identity(identity)
        if peer is None:
            return self._refuse(Refusal.ROLE)
        if peer.job != self._me.job:
            return self._refuse(Refusal.JOB)
        if (peer.role, peer.level) != (self._me.role, self._me.level):
            return self._refuse(Refusal.ROLE)
        answer = _pack_identity(self._me, Refusal.OK, bytes(NONCE_NBYTES))
        self.peer = peer
        self.done = True
        return answer + self._mac(b"acceptor", self._challenge, message, answer)

    def _refuse(self, code: Refusal) -> bytes:
        # The dialer is told why: it knows its own mistake anyway, and a person can then mend it.
        self.error = _REFUSAL_TEXT[code]
        nobody = Hello(self._me.role, b"", 0, 0)
        return _pack_identity(nobody, code, bytes(NONCE_NBYTES)) + bytes(_MAC_NBYTES)


class DialerHandshake(_Handshake):
    """The dialing side; `expect_server` is whom it wants to reach, and in which life (None: in any).

    `expect_server` None: whoever has the token.
    """

    def __init__(
        self,
        token: bytes,
        me: Hello,
        nonce: bytes,
        expect_server: int | None = None,
        expect_life: int | None = None,
    ) -> None:
        super().__init__(token, me, nonce)
        self._expect_server = expect_server
        self._expect_life = expect_life
        self._challenge = b""
        self._sent = b""

    def start(self) -> bytes:
        """Return what to send first: nothing, the acceptor begins."""
        self._expected = _CHALLENGE.size
        return b""

    def _take(self, message: bytes) -> bytes:
        if self._sent:
            self._check_answer(message)
            return b""
        self._challenge = message
        identity = _pack_identity(self._me, Refusal.OK, self._nonce)
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
        peer = _unpack_identity(identity)
        if peer is None or (peer.role, peer.job, peer.level) != (self._me.role, self._me.job, self._me.level):
            self.error = "the other side answered as somebody else"
        elif self._expect_server is not None and peer.server != self._expect_server:
            self.error = f"server {peer.server} answered instead of server {self._expect_server}"
        elif self._expect_life is not None and peer.life != self._expect_life:
            self.error = f"server {peer.server} answered in another life"
        else:
            self.peer = peer
            self.done = True


def _pack_identity(who: Hello, code: Refusal, nonce: bytes) -> bytes:
    return _IDENTITY.pack(
        _MAGIC, VERSION, code, who.role, len(who.job), who.level, who.server, who.life, who.job, nonce
    )


def _unpack_identity(identity: bytes) -> Hello | None:
    _, _, _, role, job_nbytes, level, server, life, job, _ = _IDENTITY.unpack(identity)
    if role not in tuple(Role) or job_nbytes > MAX_JOB_NBYTES or any(job[job_nbytes:]):
        return None
    return Hello(Role(role), job[:job_nbytes], server, level, life)


class Beat(NamedTuple):
    """One heartbeat: `server` says to `dest`, over its NIC of `level`, that it is alive."""

    server: int
    dest: int
    level: int
    sequence: int


def seal_beat(token: bytes, job: bytes, beat: Beat) -> bytes:
    """Return the datagram of a heartbeat, `BEAT_NBYTES` long."""
    body = _BEAT.pack(_BEAT_MAGIC, VERSION, 0, beat.level, beat.server, beat.dest, beat.sequence)
    return body + _beat_mac(token, job, body)


def open_beat(token: bytes, job: bytes, datagram: bytes) -> Beat | None:
    """Return the heartbeat in a datagram, or None if it is not one made with this token for this job."""
    if len(datagram) != BEAT_NBYTES:
        return None
    body = datagram[: _BEAT.size]
    magic, version, _, level, server, dest, sequence = _BEAT.unpack(body)
    if magic != _BEAT_MAGIC or version != VERSION:
        return None  # before the hash, which is what garbage would have us spend time on
    if not hmac.compare_digest(datagram[_BEAT.size :], _beat_mac(token, job, body)):
        return None
    return Beat(server, dest, level, sequence)


def _beat_mac(token: bytes, job: bytes, body: bytes) -> bytes:
    return hmac.digest(token, b"bml beat" + job + b"\0" + body, "sha256")[:_BEAT_MAC_NBYTES]
