"""Tensors that hold a known number: how they are found and read."""
