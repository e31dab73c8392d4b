"""The base of all transports: a link per (peer, level), which is dialled, kept, probed and opened again.

transport    `LinkTransport`, the base of every transport: which links are wanted, faults, what is lost
link         `Link`: the state, queue and counters of one (peer, level); `LinkConnection`, the contract of
             what moves its frames
nic          `LocalNic`: one NIC of this server, with its listener and its heartbeats
ports        the sockets of a NIC, and the sizes of the kernel's buffers
heartbeats   sending and checking heartbeats over one NIC
opening      the attempts to open a link
parking      connections from peers that are ahead of this server
probing      probes: does a path carry data?
settings     `LinkSettings`, and how settings are read from the environment
"""
