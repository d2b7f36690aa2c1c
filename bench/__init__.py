"""The benchmarks of `make bench`: modules with a `main`, which compare kp_tpu with stock openxla and eager."""
