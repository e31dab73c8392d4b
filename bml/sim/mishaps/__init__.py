"""What goes wrong in a simulated run, drawn from a seed."""
