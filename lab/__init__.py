"""What the tests and the measurements need around plimsoll: real engines and the means to install them."""
