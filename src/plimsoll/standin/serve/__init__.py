"""The stand-in as a server: vLLM's HTTP answers over simulated engines, on real sockets and in real or scaled time."""
