"""The launcher: starts a job, follows it, starts servers again, and makes one result of their reports."""
