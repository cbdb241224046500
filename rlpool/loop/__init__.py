"""The step loop: agents on environments, in any process."""
