"""What a job's metrics are and how they are counted: one table, which every way to publish them reads."""
