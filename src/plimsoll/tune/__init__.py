"""The best flags for this traffic, this model and this card: plan's pool for each setting, simulate's behaviour in it."""
