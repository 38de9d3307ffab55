"""The real vLLM 0.32.0 without a GPU: installed once, started by tests, and asked about its own flags."""
