"""What a run is, and where it stands: found out before training, written down while it trains."""
