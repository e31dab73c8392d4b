"""What runs in a process of a job: a server or the coordinator, from start to exit."""
