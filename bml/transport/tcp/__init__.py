"""The transport over TCP, the default: frames travel on the link's stream itself.

Roles, by module; `bml.transport` says what each role is:

    transport    `TcpTransport`, the `Transport`: makes connections
    connection   `TcpConnection`: reads and writes the stream of one link
    incoming     `Incoming`: the receiving half; bytes become frames, payloads land in place
    zero_copy    both halves between servers of one host: payloads are read in the sender's memory

There is no module for the sending half. A frame waits in the link's queue, and that queue writes to the
socket itself: `SendQueue` of `bml.io.sendqueue`, which control channels use, too.
"""
