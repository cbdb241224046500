"""Batchers: requests, and the workers that run them."""
