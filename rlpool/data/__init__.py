"""Named tensors, their specs, and the memory that holds them."""
