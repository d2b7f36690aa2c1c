"""Benchmarks behind `make bench`: each a module with a `main`, measured beside stock openxla and eager."""
