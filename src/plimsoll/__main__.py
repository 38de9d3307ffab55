"""`python -m plimsoll` is `plimsoll`."""

from plimsoll.cli.main import run_and_exit

run_and_exit()
