"""Device memory: statistics, pools, and tracking of live tensors."""
