"""Watches engines, judges them and decides what to do; clock, sockets and files are passed in."""
