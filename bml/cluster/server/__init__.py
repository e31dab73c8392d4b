"""A server's shell: the loop that polls, carries out what the core says, and meets the training thread."""
