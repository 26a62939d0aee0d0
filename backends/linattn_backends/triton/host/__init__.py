"""What every core's host code shares: cutting sequences, tiles, variants."""
