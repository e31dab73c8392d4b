"""Which algorithm: the registry, the cost model, plans and their comparison."""
