"""Memory that processes share."""
