"""Other simulators, each in an environment of its own, run on the same work for comparison."""
