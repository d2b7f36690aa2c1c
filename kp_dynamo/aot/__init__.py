"""Compile for a TPU that is not there, with the TPU's own compiler, and report what it makes of a model."""
