"""What the backward recomputes: policies, budgets, tags."""
