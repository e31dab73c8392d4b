"""The protocol without I/O: a server's steps and membership, and the coordinator that decides views.

Everything here is a state machine, `handle(event, now) -> instructions`: no socket, no clock, no
thread. The simulator (`bml.sim`), the tests and the real server run the same objects.
"""
