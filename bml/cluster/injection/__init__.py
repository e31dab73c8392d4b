"""Faults of a plan, applied in the processes of a job: when they are due, which server acts, and the acts."""
