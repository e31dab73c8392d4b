"""The fleets on an emulated fabric: each server in its own network namespace, as a process or a Ray node."""
