"""The nouns every part shares; imports nothing of ours."""
