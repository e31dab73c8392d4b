"""Steps of the optimizer that are taken bucket by bucket, when the next forward pass needs the parameters."""
