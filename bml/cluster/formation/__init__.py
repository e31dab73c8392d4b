"""A job of processes that another program started: they meet in a key-value store, and need no launcher."""
