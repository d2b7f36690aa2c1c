"""How a linear layer and its activation are written in ATen."""
