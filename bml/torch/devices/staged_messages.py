"""Messages of tensors on a device: their bytes go through twins in page-locked memory."""

from __future__ import annotations

from bml.torch.devices.device import Device
from bml.torch.devices.device_work import DeviceWork
from bml.torch.devices.pinned import PinnedMemory
from bml.torch.devices.staging import plain
from bml.torch.messages import Messages
from bml.torch.tensors import Tensor, check_writable, raw
from bml.torch.work import GroupWork


def send(
    messages: Messages, device: Device, memory: PinnedMemory, tensor: Tensor, to: int, tag: int
) -> GroupWork:
    """Begin to send one tensor. The caller waits until it is in host memory, so messages keep their order."""
    messenger = messages.ready()
    source, work = plain(tensor), DeviceWork("send", [tensor], messages.limit_s, device)
    slab = memory.take([source])
    try:
        (twin,) = slab.tensors([source])
        memory.copy_out(slab, source, twin, device.mark()).wait()
        begun = messenger.begin_send(raw(twin), to, tag)
    except BaseException:
        memory.give_back(slab)
        raise

    def receipt() -> int:
        try:
            return begun.result()
        finally:
            memory.give_back(slab)

    return messages.settle_later(begun, work, receipt)


def recv(
    messages: Messages, device: Device, memory: PinnedMemory, tensor: Tensor, source: int, tag: int
) -> GroupWork:
    """Begin to receive one tensor; the `source_rank` of the work is the rank that sent it."""
    messenger = messages.ready()
    check_writable([tensor], "recv")
    work = DeviceWork("recv", [tensor], messages.limit_s, device)
    called = device.mark()
    slab = memory.take([tensor])
    try:
        (twin,) = slab.tensors([tensor])
        begun = messenger.begin_recv(raw(twin), source, tag)
    except BaseException:
        memory.give_back(slab)
        raise

    def receipt() -> int:
        try:
            found = begun.result()
            work.came = memory.copy_in(slab, twin, tensor, called)
        finally:
            memory.give_back(slab)
        return found

    return messages.settle_later(begun, work, receipt)
