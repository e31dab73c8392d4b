"""The coordinator's core, pure: evidence, agreement on the next view, joiners, the end of the job."""
