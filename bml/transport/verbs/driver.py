"""The contract of `rdma`, implemented on pyverbs of rdma-core 44 to 59. Only this module imports pyverbs.

pyverbs keeps the interpreter's lock in every call, so no call here waits: a channel is read only when there
is an event, and queues are polled. Work requests of pyverbs free their C memory only when they are closed,
and must be closed once.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bml.io.memory import Registration
from bml.topology.errors import FabricError
from bml.transport.verbs.devices import Gid
from bml.transport.verbs.rdma import Address, Completion, Depth, Nic, QueuePair, Reliability, Write

_HOP_LIMIT = 64
_MIN_RNR_TIMER = 12
_RNR_RETRIES = 7
_PORT_ACTIVE = 4
_PSN_BITS = 24
_CHAIN = 16
"""The most work requests that one call posts."""
_CHANNEL_LINK = "anon_inode:[infinibandevent]"


class _Pyverbs:
    """The modules of pyverbs. Raises FabricError if they are not installed."""

    def __init__(self) -> None:
        # pyverbs changes the root logger when it is imported.
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            self._import()
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)

    def _import(self) -> None:
        try:
            import pyverbs.addr
            import pyverbs.cq
            import pyverbs.device
            import pyverbs.mr
            import pyverbs.pd
            import pyverbs.pyverbs_error
            import pyverbs.qp
            import pyverbs.wr
        except ImportError as error:
            raise FabricError(
                f"the transport verbs needs pyverbs, of the release of this machine's rdma-core: {error}; "
                "docs/guides/rdma.md says how to install it"
            ) from error
        try:
            import pyverbs.enums as enums
        except ImportError:
            import pyverbs.libibverbs_enums as enums  # where newer releases have them
        self.enums: Any = enums
        self.addr: Any = pyverbs.addr
        self.cq: Any = pyverbs.cq
        self.device: Any = pyverbs.device
        self.mr: Any = pyverbs.mr
        self.pd: Any = pyverbs.pd
        self.qp: Any = pyverbs.qp
        self.wr: Any = pyverbs.wr
        self.error: Any = pyverbs.pyverbs_error.PyverbsError


def open_nic(gid: Gid) -> Nic:
    """Open the device and port of a GID. Raises FabricError, which says what to check."""
    return PyverbsNic(_Pyverbs(), gid)


class PyverbsNic:
    """See `rdma.Nic`."""

    def __init__(self, lib: _Pyverbs, gid: Gid) -> None:
        self.name = gid.device
        self.description = f"{gid.device} port {gid.port}, GID {gid.place} ({gid.text}, {gid.kind})"
        self.gid = gid
        self._lib = lib
        try:
            self._context = lib.device.Context(name=gid.device)
            self._pd = lib.pd.PD(self._context)
            self.posting = _Posting(lib)
            self.mtu = int(self._context.query_port(gid.port).active_mtu)
        except lib.error as error:
            raise FabricError(
                f"cannot open the RDMA device {gid.device}: {error}; may this process use /dev/infiniband, "
                "and does pyverbs match this machine's rdma-core?"
            ) from error

    def register(self, address: int, nbytes: int) -> Registration:
        """See `rdma.Nic`."""
        enums = self._lib.enums
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
        try:
            return _Region(self._lib.mr.MR(self._pd, nbytes, access, address=address))
        except self._lib.error as error:
            raise _os_error(error) from error

    def queue_pair(self, depth: Depth, reliability: Reliability) -> QueuePair:
        """See `rdma.Nic`."""
        try:
            return _Pair(self._lib, self, self._context, self._pd, depth, reliability)
        except self._lib.error as error:
            raise _os_error(error) from error

    def trouble(self) -> str:
        """See `rdma.Nic`."""
        try:
            state = int(self._context.query_port(self.gid.port).state)
        except self._lib.error as error:
            return f"{self.name} does not answer: {error}"
        return "" if state == _PORT_ACTIVE else f"the port of {self.name} is down, state {state}"

    def close(self) -> None:
        """See `rdma.Nic`."""
        self.posting.close()
        self._pd.close()
        self._context.close()


class _Region:
    """A registered region."""

    def __init__(self, mr: Any) -> None:
        self._mr = mr
        self.lkey: int = mr.lkey
        self.rkey: int = mr.rkey

    def close(self) -> None:
        self._mr.close()


class _Posting:
    """The work requests of a NIC. They are made once and changed for every use, as making one takes ten times
    as long.

    They are linked, so that one call posts several. A link cannot be undone, so a list of k requests is the
    last k of the chain.
    """

    def __init__(self, lib: _Pyverbs) -> None:
        enums, wr = lib.enums, lib.wr
        self._imm_opcode = enums.IBV_WR_RDMA_WRITE_WITH_IMM
        self._write_opcode = enums.IBV_WR_RDMA_WRITE
        self._signaled_flag = enums.IBV_SEND_SIGNALED
        # A request owns its element from now on, and frees it when it is closed.
        self._sges = [wr.SGE(0, 0, 0) for _ in range(_CHAIN)]
        self._sends = [wr.SendWR(0, self._imm_opcode, 1, 0, [sge], 0) for sge in self._sges]
        for request, sge in zip(self._sends, self._sges, strict=True):
            request.sg_list = sge
        # An immediate write uses no memory of the receive, but pyverbs requires an element.
        self._nowhere = wr.SGE(0, 0, 0)
        self._receives = [wr.RecvWR(0, 1, [self._nowhere]) for _ in range(_CHAIN)]
        for chain in (self._sends, self._receives):
            for request, following in pairwise(chain):
                request.next_wr = following

    def writes(self, qp: Any, writes: Sequence[Write]) -> None:
        """Post them; raises PyverbsError."""
        for start in range(0, len(writes), _CHAIN):
            some = writes[start : start + _CHAIN]
            first = _CHAIN - len(some)
            for sge, request, write in zip(self._sges[first:], self._sends[first:], some, strict=True):
                wr_id, local, remote, imm, signaled = write
                sge.lkey, sge.addr, sge.length = local
                request.wr_id = wr_id
                request.send_flags = self._signaled_flag if signaled else 0
                if imm is None:
                    request.opcode = self._write_opcode
                else:
                    request.opcode = self._imm_opcode
                    request.imm_data = _swapped(imm)
                request.set_wr_rdma(*remote)
            qp.post_send(self._sends[first])

    def receives(self, qp: Any, count: int) -> None:
        """Post `count` receives; raises PyverbsError."""
        for start in range(0, count, _CHAIN):
            qp.post_recv(self._receives[-min(_CHAIN, count - start)])

    def close(self) -> None:
        """Free all requests. Idempotent."""
        if self._sends:
            self._nowhere.close()
        while self._sends:
            self._sends.pop().close()
            self._receives.pop().close()


class _Pair:
    """See `rdma.QueuePair`."""

    def __init__(
        self, lib: _Pyverbs, nic: PyverbsNic, context: Any, pd: Any, depth: Depth, reliability: Reliability
    ) -> None:
        self._lib = lib
        self._gid = nic.gid
        self._reliability = reliability
        self._error = lib.error
        self._posting = nic.posting
        self._open: list[Any] = []
        try:
            self._channel, self.fd = _channel(lib, context)
            self._open.append(self._channel)
            self._cq = lib.cq.CQ(context, depth.sends + depth.receives, None, self._channel, 0)
            self._open.append(self._cq)
            enums = lib.enums
            cap = lib.qp.QPCap(
                max_send_wr=depth.sends, max_recv_wr=depth.receives, max_send_sge=1, max_recv_sge=1
            )
            # The default of pyverbs is a completion for every request.
            init = lib.qp.QPInitAttr(
                qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0
            )
            attr = lib.qp.QPAttr(port_num=nic.gid.port)
            attr.qp_access_flags = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
            self._qp = lib.qp.QP(pd, init, attr)
            self._open.append(self._qp)
        except BaseException:
            self.close()
            raise
        self.address = Address(self._qp.qp_num, secrets.randbits(_PSN_BITS), nic.gid.text, nic.mtu)

    def connect(self, remote: Address) -> None:
        lib, gid = self._lib, self._gid
        try:
            route = lib.addr.GlobalRoute(
                dgid=lib.addr.GID(remote.gid),
                sgid_index=gid.place,
                hop_limit=_HOP_LIMIT,
                traffic_class=self._reliability.traffic_class,
            )
            attr = lib.qp.QPAttr(port_num=gid.port)
            attr.dest_qp_num = remote.number
            attr.path_mtu = min(remote.mtu, self.address.mtu)
            attr.rq_psn = remote.psn
            attr.sq_psn = self.address.psn
            attr.max_rd_atomic = 1
            attr.max_dest_rd_atomic = 1
            attr.min_rnr_timer = _MIN_RNR_TIMER
            attr.timeout = self._reliability.timeout
            attr.retry_cnt = self._reliability.retries
            attr.rnr_retry = _RNR_RETRIES
            attr.ah_attr = lib.addr.AHAttr(port_num=gid.port, is_global=1, gr=route)
            self._qp.to_rts(attr)
        except (self._error, ValueError) as error:
            raise _os_error(error) from error

    def post_receives(self, count: int) -> None:
        try:
            self._posting.receives(self._qp, count)
        except self._error as error:
            raise _os_error(error) from error

    def post(self, writes: Sequence[Write]) -> None:
        try:
            self._posting.writes(self._qp, writes)
        except self._error as error:
            raise _os_error(error) from error

    def arm(self, has_event: bool) -> None:
        try:
            if has_event:
                self._channel.get_cq_event(self._cq)
                self._cq.ack_events(1)
            self._cq.req_notify()
        except self._error as error:
            raise _os_error(error) from error

    def poll(self, most: int) -> list[Completion]:
        try:
            _, found = self._cq.poll(most)
        except self._error as error:
            raise _os_error(error) from error
        return [Completion(wc.wr_id, wc.status, _swapped(wc.imm_data)) for wc in found]

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


def _channel(lib: _Pyverbs, context: Any) -> tuple[Any, int]:
    """A completion channel and its descriptor, which older releases of pyverbs do not show."""
    before = _channel_fds()
    channel = lib.cq.CompChannel(context)
    fd = getattr(channel, "fd", None)
    if fd is None:
        (fd,) = _channel_fds() - before
    os.set_blocking(fd, False)
    return channel, int(fd)


def _channel_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _CHANNEL_LINK:
                found.add(int(name))
        except OSError:  # it was the descriptor of the listing
            continue
    return found


def _swapped(imm: int) -> int:
    """Swap between the byte order of this machine and that of the network, for immediate values."""
    return int.from_bytes(imm.to_bytes(4, "little"), "big")


def _os_error(error: Exception) -> OSError:
    code = getattr(error, "error_code", 0) or errno.EIO
    return OSError(code, str(error))
