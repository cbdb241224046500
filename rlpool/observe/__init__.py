"""Activity of a running program: the shared record of its workers, and its statistics."""
