"""The object API below the backend: checkpoints, device memory."""
