"""A conformance suite for experience collectors: data, selection, seeds, faults, limits."""
