"""What this machine and this process allow: limits, pickling, signals, arguments."""
