"""`bml plan`: a schedule, verified, compared and drawn."""
