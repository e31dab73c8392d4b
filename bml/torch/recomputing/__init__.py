"""A communication hook of DDP with which survivors compute the samples of lost ranks."""
