"""Operators of our own (`torch.ops.kp`), registered once when this package is imported."""

from kp_dynamo.ops.linear_act import ACTIVATIONS

__all__ = ["ACTIVATIONS"]
