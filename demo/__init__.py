"""The demo of `make demo`: a byte-level GPT, trained on the sources of the standard library."""
