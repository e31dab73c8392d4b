"""The flight recorder of a server's core, and the replay of what it recorded."""
