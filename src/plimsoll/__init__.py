"""Plimsoll keeps a vLLM server inside its GPU memory."""

__version__ = "0.1.0"
