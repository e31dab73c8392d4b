"""The check of decoded messages against the fabric: a message that cannot be true is refused.

Types are checked when a message is decoded (messages.py). Numbers are checked here: servers and levels must
exist, epochs must fit into a frame, and the members of a view must be the live servers, and connected.
"""

from __future__ import annotations

from functools import lru_cache

from bml.faults.slowness import MOST_HALVINGS
from bml.protocol.wire import messages as msg
from bml.protocol.wire.messages import MessageError, View
from bml.topology import Fabric
from bml.topology.errors import UsageError

_OfLink = msg.Suspect | msg.Withdraw | msg.Interrupted | msg.Held | msg.Healthy | msg.Relapsed

_MOST_EPOCH = 2**32 - 1  # a frame's
_MOST = 2**63 - 1


def check_for_server(message: msg.Message, fabric: Fabric) -> msg.ToServer:
    """Return a message of a coordinator; raises MessageError if it cannot be true on `fabric`."""
    if not isinstance(message, msg.ToServer):
        raise MessageError(f"{type(message).__name__} is not for a server")
    if not isinstance(message, msg.Inject):
        _within(message.term, 0, _MOST, "term")
    if isinstance(message, msg.Freeze | msg.Install | msg.Evict):
        _within(message.epoch, 0, _MOST_EPOCH, "epoch")
    if isinstance(message, msg.Propose):
        _check_view(message.view, fabric)
    return message


def check_from_server(message: msg.Message, server: int, fabric: Fabric) -> msg.ToCoordinator:
    """Return a message of `server`; raises MessageError if it is impossible, or speaks for another server."""
    if not isinstance(message, msg.ToCoordinator):
        raise MessageError(f"{type(message).__name__} is not for a coordinator")
    if isinstance(message, msg.Inject):
        return message
    if isinstance(message, _OfLink):
        _same(message.observer, server)
        _check_link(message, fabric)
        return message
    _same(message.server, server)
    match message:
        case msg.Status():
            _check_status(message, fabric)
        case msg.Accepted(_, term, epoch) | msg.Refused(_, term, epoch):
            _within(term, 0, _MOST, "term")
            _within(epoch, 0, _MOST_EPOCH, "epoch")
        case msg.Deposed(_, term):
            _within(term, 0, _MOST, "term")
        case msg.CaughtUp(_, epoch) | msg.NeedsState(_, epoch):
            _within(epoch, 0, _MOST_EPOCH, "epoch")
        case msg.Progress(_, step):
            _within(step, 0, _MOST, "step")
        case msg.Measured():
            _check_measured(message, fabric)
    return message


def _check_status(status: msg.Status, fabric: Fabric) -> None:
    _within(status.term, 0, _MOST, "term")
    _within(status.epoch, 0, _MOST_EPOCH, "epoch")
    _within(status.promised, 0, _MOST_EPOCH, "epoch")
    _within(status.committed, 0, _MOST, "step")
    _within(status.complete, -1, _MOST, "step")
    for view in (status.installed, status.accepted):
        if view is not None:
            _check_view(view, fabric)
    if status.incarnation is not None:
        _check_incarnation(status.incarnation)
        _same(status.incarnation.server, status.server)


def _check_measured(message: msg.Measured, fabric: Fabric) -> None:
    _within(message.epoch, 0, _MOST_EPOCH, "epoch")
    for peer, level, nbytes, busy_us in message.moved:
        _check_neighbours(message.server, peer, level, fabric)
        _within(nbytes, 0, _MOST, "number of bytes")
        _within(busy_us, 1, _MOST, "time in µs")


def _check_view(view: View, fabric: Fabric) -> None:
    wrong = _wrong_view(view, fabric)
    if wrong:
        raise MessageError(wrong)


@lru_cache(maxsize=32)  # every server's Status has the same views
def _wrong_view(view: View, fabric: Fabric) -> str:
    """Why this view is impossible, "" if it is not."""
    try:
        _check_new_view(view, fabric)
    except MessageError as error:
        return str(error)
    return ""


def _check_new_view(view: View, fabric: Fabric) -> None:
    _within(view.epoch, 1, _MOST_EPOCH, "epoch")
    _within(view.commit, 0, _MOST, "step")
    try:
        left = fabric.without(*view.failures)
        fabric.without(*(part for part, _ in view.failed))
    except UsageError as error:
        raise MessageError(f"view {view.epoch}: {error}") from None
    if view.members != left.servers or not left.is_connected:
        raise MessageError(f"view {view.epoch} of {view.members}, alive and connected are {left.servers}")
    if not {*view.learners} < {*view.members}:
        raise MessageError(f"view {view.epoch} of {view.members} cannot have the learners {view.learners}")
    joined = [incarnation.server for incarnation in view.joined]
    if not {*joined} <= {*view.members} or len(set(joined)) < len(joined):
        raise MessageError(f"view {view.epoch} of {view.members}: servers {joined} cannot have joined")
    for incarnation in view.joined:
        _check_incarnation(incarnation)
    for _, times in view.failed:
        _within(times, 0, _MOST, "number of failures")
    _check_rates(view, left)


def _check_rates(view: View, left: Fabric) -> None:
    nics = [(rate.server, rate.level) for rate in view.rates]
    if nics != sorted({*nics}) or not {*nics} <= {*left.links}:
        raise MessageError(f"view {view.epoch}: {nics} are not the live NICs of rates, each once, in order")
    for rate in view.rates:
        _within(rate.halvings, 0, MOST_HALVINGS, "number of halvings")
        _within(rate.times, 1, _MOST, "number of failures")


def _check_incarnation(incarnation: msg.Incarnation) -> None:
    _within(incarnation.number, 1, _MOST, "incarnation")


def _check_link(message: _OfLink, fabric: Fabric) -> None:
    own = isinstance(message, msg.Suspect) and message.kind == "own-nic"
    _check_neighbours(message.observer, message.peer, message.level, fabric, own)
    if isinstance(message, msg.Suspect) and message.losing not in (None, message.observer, message.peer):
        raise MessageError(f"server {message.losing} is no end of that connection")


def _check_neighbours(observer: int, peer: int, level: int, fabric: Fabric, own: bool = False) -> None:
    """`own`: the two are one server and its NIC."""
    servers = range(fabric.n_servers)
    if observer not in servers or peer not in servers or level not in range(fabric.levels):
        raise MessageError(f"there is no link from {observer} to {peer} of level {level} in {fabric.name}")
    group = fabric.group(observer, level)
    if group < 0 or group != fabric.group(peer, level) or (observer == peer) != own:
        raise MessageError(f"servers {observer} and {peer} are no neighbours on level {level}")


def _same(said: int, server: int) -> None:
    if said != server:
        raise MessageError(f"server {server} speaks for server {said}")


def _within(value: int, least: int, most: int, what: str) -> None:
    if not least <= value <= most:
        raise MessageError(f"{what} {value}, {least} to {most} is possible")
