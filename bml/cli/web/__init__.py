"""Options of the live page, for the commands that have it."""
