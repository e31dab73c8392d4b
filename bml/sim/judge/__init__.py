"""What a simulated run is held to: its history, the promises, and when memory may be read."""
