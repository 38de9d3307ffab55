"""Results to words: text that reads well without colour, and JSON with a schema. Nothing here writes anywhere."""
