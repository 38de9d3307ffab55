"""The files that a team needs to launch and watch a vLLM server, as texts: for one plan and one vLLM version."""
