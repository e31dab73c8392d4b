"""The mishaps of a simulated run, drawn from a seed, and the servers that they may cost."""
