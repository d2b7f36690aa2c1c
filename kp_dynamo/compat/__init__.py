"""Differences between versions of torch and torch_xla. Empty, so that `doctor` reads versions without torch."""
