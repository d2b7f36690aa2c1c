"""Every difference between versions of torch and torch_xla. Empty: `doctor` reads versions without torch."""
