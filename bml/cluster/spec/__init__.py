"""The records that parts of a job exchange: specification, constants, traces, ends of training functions."""
