"""What the parts of a job tell each other: its specification, constants, traces, how a function ended."""
