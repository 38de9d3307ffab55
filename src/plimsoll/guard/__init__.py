"""Watches engines and judges them. Deciding only: clock, sockets and files are handed in."""
