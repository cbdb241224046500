"""What a user writes as an agent, and what helps to write it."""
