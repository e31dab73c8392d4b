"""The operating system below all transports: polling, registered memory, limits, forks. No protocol."""
