"""Sequence-length buckets: which padded length, how to choose it, padding and slicing at run time."""
