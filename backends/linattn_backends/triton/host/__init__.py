"""What every core's host code shares: what is read off a call, cutting sequences, tiles, variants."""
