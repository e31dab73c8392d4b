"""The processes of a job: the interface of all launchers, and the launcher for plain processes."""
