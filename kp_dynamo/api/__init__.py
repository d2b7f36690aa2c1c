"""The object API: the classes of a TPU framework, on top of the `kp_tpu` backend."""
