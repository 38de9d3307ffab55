"""Replays traffic through an exact model of vLLM's block pool and scheduler. Pure: files and clocks are elsewhere."""
