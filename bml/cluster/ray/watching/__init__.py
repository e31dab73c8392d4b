"""What a job on Ray watches beside its servers: Ray's head, nodes that drain, machines that are missing."""
