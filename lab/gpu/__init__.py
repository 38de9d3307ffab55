"""What has to run on a machine with a GPU; CI has none, so its results are kept under tests/captures/."""
