"""What a running program does: the shared record of its workers, its statistics, its traces."""
