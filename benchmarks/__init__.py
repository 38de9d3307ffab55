"""Speed and memory, as ratios against a baseline in the same run: `make bench`."""
