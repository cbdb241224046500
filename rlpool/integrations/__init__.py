"""Integrations with other libraries, one module each, imported on use."""
