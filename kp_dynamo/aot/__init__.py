"""Ahead-of-time compilation with the TPU compiler, without a TPU, and a report of the compiled programs."""
