"""How a linear layer and its activation appear in ATen graphs."""
