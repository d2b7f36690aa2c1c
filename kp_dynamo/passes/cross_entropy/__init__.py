"""What `fuse_linear_cross_entropy` is made of: a Linear layer whose logits a loss of one class per row reads."""
