"""The replay pool: rings of transitions, and how they are filled and sampled."""
