"""What rlpool offers for other libraries, one module for each, which is imported on use."""
