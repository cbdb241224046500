"""The replay store: rings of transitions, what goes into them and how they are sampled."""
