"""The order in which a program computes its values."""
