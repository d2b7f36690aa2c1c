"""What `gather_weights` is made of: the gathers of weights that chips along the batch divide."""
