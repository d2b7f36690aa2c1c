"""How attention is written in ATen: the matcher, its gradients, its masks."""
