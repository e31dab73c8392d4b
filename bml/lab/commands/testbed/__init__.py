"""`bml bench train`, and what commands that measure have in common."""
