"""Recordings of jobs on the command line: where `bml run` leaves them, and `bml replay`."""
