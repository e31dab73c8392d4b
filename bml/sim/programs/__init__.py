"""Random training programs on the real session over a simulated communicator: a model of users."""
