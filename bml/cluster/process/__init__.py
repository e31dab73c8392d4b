"""The processes of a job: the program of a server, and of the coordinator, from start to exit."""
