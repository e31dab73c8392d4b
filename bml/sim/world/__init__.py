"""The surroundings of simulated servers: a clock, a network with delays, processes, coordinators."""
