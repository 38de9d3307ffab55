"""The play of `plimsoll demo`: a small fleet without a GPU, traffic, a real guard, and four incidents."""
