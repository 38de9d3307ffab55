"""The article that plimsoll starts from, put to the test: its sidecar, written anew, beside guard on the same incidents."""
