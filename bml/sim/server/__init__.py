"""A simulated server: a real core with real memory and arithmetic, and its user."""
