"""The object API below the backend: devices, compiled models, memory, files. What compiles is `torch.compile`."""
