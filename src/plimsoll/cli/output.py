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


def write_file(path: str, text: str) -> None:
    """Write a report to a file the user named; a plain file is replaced only once the new one is whole."""
    import tempfile
    from pathlib import Path

    target = Path(path)
    try:
        if target.exists() and (target.is_symlink() or not target.is_file()):
            target.write_text(text, encoding="utf-8")  # a device, a pipe or a link is written to, never put aside
            return
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=target.parent, delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.flush()
                temporary.chmod(0o644)
                temporary.replace(target)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise WorldFailed(f"{path}: cannot be written: {error.strerror or error}") from None
