"""What a person reads after a run: made from the run directory alone."""
