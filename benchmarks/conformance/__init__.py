"""A conformance suite for experience collectors: what comes back, from whom, and after what."""
