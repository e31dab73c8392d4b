"""Shares of a batch by the speeds of the servers: times, their exchange, and the rule that follows them."""
