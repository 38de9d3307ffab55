"""What containment tells, from the engine core to the API servers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from plimsoll.inside.figures import FILE_MAX_BYTES
from plimsoll.inside.places import start_ticks
from plimsoll.inside.survive import report
from tests.each import each


def line(**changed: Any) -> dict[str, Any]:
    told = {**report.unknown(""), "armed": True, "contained": 3, "stalled_s": 1.25, "aborted_requests": []}
    sizes = {"tokens_per_step": {"now": 512, "start": 2048}, "sequences": {"now": 128, "start": 128}}
    return {**told, **sizes, **changed}


def test_what_cores_write_is_what_their_api_server_tells(tmp_path: Path) -> None:
    """Found by the process that started them; counts add up; one that is not armed is what must be known."""
    last = {"at": 1.0, "site": "forward", "tokens": 2048, "requests": 9, "asked_bytes": 5, "free_bytes": None, "kind": ""}
    report.write(str(tmp_path), line(last=last))
    told = report.told(str(tmp_path), os.getppid())
    assert told["armed"] is True
    assert told["contained"] == 3
    assert told["tokens_per_step"] == {"now": 512, "start": 2048}
    assert told["last"]["site"] == "forward"
    assert told["last"]["age_s"] > 1e9
    assert "at" not in told["last"]
    assert report.told(str(tmp_path), 999_999_999)["armed"] is None
    report.write(str(tmp_path), line())
    other = json.loads(next(tmp_path.glob("core-*.json")).read_text())
    other |= {"pid": os.getppid(), "started": start_ticks(os.getppid()), "armed": False, "why": "it has 2 ranks"}
    (tmp_path / f"core-{os.getppid()}-{other['started']}.json").write_text(json.dumps(other))
    told = report.told(str(tmp_path), os.getppid())
    assert (told["armed"], told["why"], told["contained"]) == (False, "it has 2 ranks", 6)


def test_what_a_dead_core_left_is_not_told(tmp_path: Path) -> None:
    """Another process of the same number is not it."""
    report.write(str(tmp_path), line())
    path = next(tmp_path.glob("core-*.json"))
    told = {**json.loads(path.read_text()), "started": 1}
    path.rename(tmp_path / f"core-{os.getpid()}-1.json").write_text(json.dumps(told))
    assert report.told(str(tmp_path), os.getppid())["armed"] is None


@each("text", ["", "[]", "{", '{"schema":"plimsoll.survive/1"}', "null", "x" * (FILE_MAX_BYTES + 1)])
def test_a_torn_or_foreign_file_is_unknown(tmp_path: Path, text: str) -> None:
    """Nothing is concluded from it, nor from a value of another kind: a reader that trusted it would fail far from here."""
    (tmp_path / f"core-{os.getpid()}-{start_ticks(os.getpid())}.json").write_text(text)
    assert report.told(str(tmp_path), os.getpid())["armed"] is None
    kinds: list[dict[str, Any]] = [
        {"contained": "3"}, {"contained": True}, {"last": []}, {"last": {"at": "now"}}, {"tokens_per_step": {"now": "x"}},
        {"aborted_requests": ["a"]}, {"armed": None},
    ]  # fmt: skip
    for changed in kinds:
        report.write(str(tmp_path), line(**changed))
        assert report.told(str(tmp_path), os.getpid())["armed"] is None, changed


def test_a_request_is_found_by_the_id_its_api_server_knows(tmp_path: Path) -> None:
    """The core's id holds it; another request's reason is never told."""
    report.write(str(tmp_path), line(aborted_requests=[{"id": "cmpl-abc-0-1f", "why": "it ran out"}]))
    assert report.why_aborted(str(tmp_path), os.getpid(), "cmpl-abc") == "it ran out"
    assert report.why_aborted(str(tmp_path), os.getpid(), "cmpl-ab") is None
    assert report.why_aborted(str(tmp_path), os.getpid(), "") is None
    assert report.why_aborted(None, os.getpid(), "cmpl-abc") is None
