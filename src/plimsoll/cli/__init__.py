"""One file a command; each reads, thinks, renders and returns an exit code, and leaves the how to the other folders."""
