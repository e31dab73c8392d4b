"""What there is about metrics on the command line: `bml metrics`."""
