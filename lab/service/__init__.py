"""What the service runs of a GPU showed, and what simulate says of the same runs."""
