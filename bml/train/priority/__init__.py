"""Steps with priorities: in which order all servers send their pieces, and how they agree on it."""
