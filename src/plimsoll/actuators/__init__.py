"""The only writers to the world."""
