"""What a running program does: the shared record of its workers, and its statistics."""
