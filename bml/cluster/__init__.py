"""The shells round the pure protocol: servers, coordinator, and the launchers that start them."""
