"""The replay pool: rings of transitions, additions and sampling."""
