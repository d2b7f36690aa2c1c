"""Checkpoints: model and optimizer in one safetensors file that is replaced atomically."""
