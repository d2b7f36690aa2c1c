"""What `fuse_linear_cross_entropy` is made of: a Linear layer whose logits only a cross entropy reads."""
