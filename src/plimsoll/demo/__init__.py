"""What `plimsoll demo` plays: a small fleet without a GPU, traffic, a real guard, and four things that go wrong."""
