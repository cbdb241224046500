"""This machine and this process: limits, pickling, signals, arguments."""
