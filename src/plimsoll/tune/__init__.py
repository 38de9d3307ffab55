"""Finds the best flags for this traffic, model and card: plan gives each setting's pool, simulate replays the traffic in it."""
