"""The only readers of the world: files, processes and what they say."""
