"""The disk cache, in front of XLA's own CPU plugin (the package xla-cpu-pjrt)."""
