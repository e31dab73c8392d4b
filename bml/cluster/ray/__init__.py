"""The same on Ray: actors, a connection to it, or a Ray of the job's own."""
