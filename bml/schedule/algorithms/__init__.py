"""The algorithms, a file each: from a fabric with its failures to a forest or to rounds."""
