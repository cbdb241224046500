"""Slots: memory that workers write episodes to and users read them from."""
