"""What tcp and verbs share: a link per NIC and peer, dialled, kept, probed and made again; heartbeats."""
