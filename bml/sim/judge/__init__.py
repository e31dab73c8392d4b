"""The checks of a simulated run: its history, the promises, and when memory may be read."""
