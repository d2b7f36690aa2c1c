"""How attention appears in ATen graphs: the matcher, its gradients, its masks."""
