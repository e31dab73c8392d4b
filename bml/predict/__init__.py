"""What is to come: how long steps will take in a view, when a run ends, and what is about to fail. Pure."""
