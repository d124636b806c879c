"""Training: sharding, feeding, updating, saving."""
