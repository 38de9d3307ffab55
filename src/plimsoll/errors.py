"""Everything that can go wrong and is not a mistake of ours.

    PlimsollError            exit code
    ├── Found                    1      the command worked, and what it found is bad news
    ├── BadInput                 2      what the user gave us is wrong; the message says what and where
    │   └── TooLarge             2      more than we are willing to read
    └── WorldFailed              3      something outside did not answer, or answered nonsense
        └── TimedOut             3      it did not answer in time

The message is one line and is what the user sees. `cli.main` is the only place that prints it. A mistake of ours is an
`assert` or any other exception: the user sees one line and a hint to set PLIMSOLL_DEBUG=1.
"""

from __future__ import annotations


class PlimsollError(Exception):
    """A failure with a sentence for the user and an exit code for the shell."""

    exit_code = 1


class Found(PlimsollError):
    """The command did its work and found a problem."""

    exit_code = 1


class BadInput(PlimsollError):
    """The user's input is wrong."""

    exit_code = 2


class TooLarge(BadInput):
    """The input is larger than anything it could sensibly be."""


class WorldFailed(PlimsollError):
    """Something outside this process did not do its part."""

    exit_code = 3


class TimedOut(WorldFailed):
    """Something outside this process did not answer in time."""
