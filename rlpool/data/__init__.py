"""Named tensors."""
