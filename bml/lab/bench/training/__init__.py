"""Trainings on the emulated fabric: computation is replayed, gradients are sent, and times are compared."""
