"""The one way a command prints its answer."""

from __future__ import annotations

from plimsoll.errors import WorldFailed


def show(text: str) -> None:
    """Print to standard output; a disk that is full is the world's fault, a reader that went away is nobody's."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise WorldFailed(f"cannot write the answer: {error.strerror or error}") from None
