"""Forty commands certified on paper, eight of them written out for a GPU."""
