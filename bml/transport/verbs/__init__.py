"""The transport over RDMA: payloads move by one-sided writes from registered memory into registered memory.

Roles, by module; `bml.transport` says what each role is:

    transport    `VerbsTransport`, the `Transport`: opens the RDMA NICs and makes connections
    connection   `VerbsConnection`: one queue pair at a time, its set-up, its completions, its fence
    incoming     `Incoming`: the receiving half; messages in slots become frames, payloads land in place
    outgoing     `Outgoing`: the sending half; frames of the link's queue become messages and remote writes
    wire         the messages of both halves as bytes (pure)
    settings     `VerbsSettings`: the settings that only RDMA has
    devices      which RDMA device belongs to the address of a NIC
    rdma         the contract of an RDMA NIC; `driver` is its implementation on pyverbs

Only `driver` imports pyverbs, and it is imported when a NIC is opened and not before. So this package can be
imported on every machine.

**How a frame moves.** A connection owns the authenticated stream, over which queue pairs are set up.

    sender                                       receiver
    small frame:  copied into a slot, written  -> admitted, copied to where `admit` said
    other frame:  OFFER (its header)           -> admitted, `admit` gives a view
                  written straight from where    <- GRANT (address and key of that view, or of memory of
                  it lies to where it belongs  ->   our own if the view is not in registered memory)

Slots are a ring in the receiver's memory. The sender keeps what it wrote until the receiver has handled it.
Every message carries back how many messages have been handled, so a ring is never overrun.

**Fence.** After `fence`, memory that was granted must not be written, and memory that is being sent must not
be read. If any such memory is in use, the queue pair is destroyed, which stops the NIC, and both sides make a
new one, whose *generation* is one higher. Messages that the peer had not handled are written again, so no
frame in a slot is lost. Grants of an older generation are not used. Payloads that had been granted are
dropped, as `Transport.fence` says.
"""

from bml.transport.verbs.settings import VerbsSettings
from bml.transport.verbs.transport import VerbsTransport

__all__ = ["VerbsSettings", "VerbsTransport"]
