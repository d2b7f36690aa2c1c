"""Which chips, mesh, sharding, batch and checkpoint mode train a model best: bounds for all, compiles of the best."""
