"""What is to come: how long steps will take in a view, when a run ends, and which part is about to fail. Pure."""
