"""One client script for two servers, the real vLLM and the stand-in, and a comparison of what it saw of each."""
