"""Reads vLLM's releases and writes what each of them does: `python -m lab.catalogue`."""
