"""Compiled programs of servers, looked up by piece."""


def parts_of(programs):
    """(server, piece) -> the range in which the server's program has the piece."""
    return {
        (server, piece): part
        for server, program in programs.items()
        for part in program.ranges
        for piece in range(part.start, part.stop)
    }


def relays_of(programs):
    """(server, phase, origin, dest, piece) -> the entry by which the server passes the piece on."""
    return {
        (server, relay.phase, relay.origin, relay.dest, piece): relay
        for server, program in programs.items()
        for relay in program.relays
        for piece in range(relay.start, relay.stop)
    }
