"""Meeting of two processes: the handshake that proves the token, and the sockets and channels built on it.

auth         the handshake as a state machine, bytes in and bytes out (pure)
sealing      sealed heartbeats (pure)
greeting     a handshake over a socket; `Dial`, which connects first
listening    `Listener`: a listening socket whose connections must pass the handshake
control      channels of whole messages between servers and the coordinator
flows        what the kernel knows of a connection, and the fault that holds one
"""
