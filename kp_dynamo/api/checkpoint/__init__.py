"""Checkpoints: model and optimizer in one safetensors file, replaced as a whole or not at all."""
