"""What simulated servers live in: a clock, a network with delays, processes that freeze, coordinators."""
