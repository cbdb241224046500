"""Named tensors, what they consist of, and the memory that they lie in."""
