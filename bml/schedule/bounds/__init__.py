"""Lower bounds on the time of a step: in closed form, and by a linear program."""
