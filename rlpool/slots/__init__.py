"""Slots: where episodes are written, and where the user reads them."""
