"""The object API: classes that ask `torch.compile(backend="kp_tpu")` and torch_xla, and compile nothing themselves."""
