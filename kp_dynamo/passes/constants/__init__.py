"""How tensors that hold a known number are found and read."""
