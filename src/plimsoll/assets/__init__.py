"""What a team needs to launch and to watch a vLLM server, as texts: made from one plan, right for one vLLM version."""
