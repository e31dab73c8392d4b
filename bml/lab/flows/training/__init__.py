"""Whole trainings on a modelled network: layers, what overlaps, views, failures. Pure."""
