"""What the device holds: figures, a pool, and which tensors are alive."""
