"""A real guard process with a real journal, killed with SIGKILL at each write of it, and a second one that goes on.

    python -m lab.guard.killed FOLDER CASE

For each numbered write of the action: a process does it and is killed right before the write, another right after it. The
world (lab/guard/acting.py) is a file, which outlives both. One line of JSON for each: the write, and what is unsafe at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from lab.guard.acting import State, World
from lab.guard.acting_lives import CASES, Case, live, unsafe
from plimsoll.actuators.journal import Journal

JOURNAL, WORLD = "journal", "world.json"


class FileWorld(World):
    """A world that is written to its file at every point, and whose guard dies by its own SIGKILL."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.path = folder / WORLD
        state = State(case.mode, case.balancer)
        if self.path.exists():
            vars(state).update(json.loads(self.path.read_text(encoding="utf-8")))
        super().__init__(state)
        self.saves, self.dies = self.save, self._kill

    def save(self) -> None:
        """Write it, whole or not at all."""
        draft = self.path.with_suffix(".new")
        draft.write_text(json.dumps(vars(self.state)), encoding="utf-8")
        draft.replace(self.path)

    def _kill(self) -> None:
        self.save()
        os.kill(os.getpid(), signal.SIGKILL)


def is_write(point: str) -> bool:
    """Whether a point is that of an entry, and not of a deed."""
    return point.split()[1] in ("opened", "intent", "outcome", "closed", "restart", "note", "switch")


def one_life(folder: Path, case: Case, die_at: int | None, *, is_first: bool) -> list[str]:
    """In a process of its own; how it went, or that it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        world = FileWorld(folder, case)
        with Journal(folder / JOURNAL) as journal:
            live(world, journal, case.plan if is_first else None, die_at)
            points = list(world.points)
            found = [] if is_first else unsafe(world, journal)
        world.save()
        os.write(writer, json.dumps(points if is_first else found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return [f"killed by {os.WTERMSIG(status)}"]
    return list(json.loads(said)) if os.waitstatus_to_exitcode(status) == 0 else ["it failed"]


def fresh(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main(folder: Path, name: str) -> int:
    """All writes of one action."""
    case = next(one for one in CASES if str(one) == name)
    points = one_life(fresh(folder), case, None, is_first=True)
    writes = [(place, point) for place, point in enumerate(points, 1) if is_write(point)]
    for place, point in writes:
        ended = one_life(fresh(folder), case, place, is_first=True)
        found = one_life(folder, case, None, is_first=False)
        sys.stdout.write(json.dumps({"at": point, "ended": ended, "unsafe": found}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
