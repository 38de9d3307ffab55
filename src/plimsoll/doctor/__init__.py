"""From what is left of a server to what happened, why, and what fixes it. Pure: readers and writers are elsewhere."""
