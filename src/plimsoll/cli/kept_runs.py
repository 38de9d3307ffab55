"""Results of runs in a file that only grows: one JSON line each, so that whoever is killed goes on where it stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import BinaryIO, Self

from plimsoll.errors import BadInput, TooLarge, WorldFailed
from plimsoll.tune.goodput import Score
from plimsoll.tune.work import Failed, Result

SCHEMA = "plimsoll.run/1"
BYTES_MAX = 1 << 30


class KeptRuns:
    """What the file holds, and a hand to add to it; a context."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.results: dict[str, Result] = {}
        self.begun_with = 0
        """Results that were there before."""
        self._file: BinaryIO

    def __enter__(self) -> Self:
        try:
            self._file = Path(self.path).open("a+b")
            if not Path(self.path).is_file():
                raise BadInput(f"{self.path}: not a file")
            self._read()
        except OSError as error:
            raise WorldFailed(f"{self.path}: cannot be written: {error.strerror or error}") from None
        self.begun_with = len(self.results)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self) -> None:
        """Whole lines; one that a kill cut off is cut off for good."""
        self._file.seek(0)
        text = self._file.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:  # what was not read must not be cut off
            raise TooLarge(f"{self.path}: more than {BYTES_MAX >> 20} MiB of results; begin another file")
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                said = json.loads(line)
                if said["schema"] != SCHEMA:
                    raise KeyError("schema")
                self.results[said["run"]] = _result(said)
            except (ValueError, KeyError, TypeError):
                raise BadInput(f"{self.path}, line {number}: not a result that sweep or tune kept") from None
        if len(whole) < len(text):
            self._file.truncate(len(whole))
        self._file.seek(0, os.SEEK_END)

    def add(self, name: str, result: Result) -> None:
        """Keep it: on the disk before anything else happens."""
        said = {"failed": result.why} if isinstance(result, Failed) else {"score": result._asdict()}
        try:
            self._file.write(json.dumps({"schema": SCHEMA, "run": name, **said}).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise WorldFailed(f"{self.path}: cannot be written: {error.strerror or error}") from None
        self.results[name] = result


def _result(said: dict[str, object]) -> Result:
    if "failed" in said:
        return Failed(str(said["failed"]))
    score = said["score"]
    if not isinstance(score, dict):
        raise TypeError("score")
    return Score(**score)
