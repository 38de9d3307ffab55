"""On whole logs that other people published, where these lie beside the repository: the cause, and memory or not."""

from __future__ import annotations

import gzip
import random
import zlib
from functools import cache

import pytest

from benchmarks.doctor_accuracy import LOGS, PROMISED, Labelled, Scored, judged, of_others
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.vllm.failure_texts import TEXTS
from tests.doctor.test_mutations import MUTATIONS
from tests.each import each, times
from tests.log_bytes import log_of_bytes

PUBLISHED = list(of_others(LOGS)) if LOGS.is_dir() else []
TIMES = times(3, 60)  # for each log
LARGEST = 400_000  # bytes of a log that is damaged often: of a larger one the beginning and the end

needs_logs = pytest.mark.skipif(not PUBLISHED, reason="the published logs are not beside the repository")


@cache
def _score(one: Labelled) -> Scored:
    return judged(one, read_log(str(one.path)), TEXTS)


@needs_logs
def test_the_right_cause_comes_first_nearly_always() -> None:
    """In 95 of 100 the first finding is the labelled cause."""
    right = [one.name for one in PUBLISHED if _score(one).code_is_right]
    assert len(right) / len(PUBLISHED) >= PROMISED, {one.name: _score(one).code for one in PUBLISHED if one.name not in right}


@needs_logs
@each("one", PUBLISHED, ids=lambda one: one.name)
def test_memory_is_judged_right_in_all(one: Labelled) -> None:
    """Yes where it was, no where it was not, and "cannot be told" only where the log simply stops."""
    assert _score(one).memory_is_right, (_score(one).code, _score(one).memory)


def _lines(one: Labelled) -> list[bytes]:
    data = one.path.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    if len(data) > LARGEST:
        data = data[: LARGEST // 2] + b"\n" + data[-LARGEST // 2 :]
    return data.split(b"\n")


@needs_logs
@each("one", PUBLISHED, ids=lambda one: one.name)
def test_damage_never_turns_the_answer_round(one: Labelled) -> None:
    """Cut, thinned, mixed, stripped: never the confident opposite; a cut log may look healthy where its failure is gone.

    A log that simply stops shows no failure that could be turned round.
    """
    lines = _lines(one)
    may_be = {*one.memory, *((False,) if None in one.memory else ())}
    wrong = []
    for number in range(TIMES):
        mutation = MUTATIONS[(number + TIMES * (len(lines) % 2)) % len(MUTATIONS)]
        damaged = mutation(lines, random.Random(zlib.crc32(f"{one.name} {number}".encode())))
        found = diagnose([log_of_bytes("damaged.log", b"\n".join(damaged))])
        confidence = found.findings[0].confidence if found.findings else 1.0
        if found.memory_failure is None or confidence < 0.5 or found.memory_failure in may_be or _is_still_well(damaged):
            continue
        wrong.append(f"{mutation.__name__}, number {number}: {found.memory_failure}, {[str(f) for f in found.findings[:1]]}")
    assert wrong == []


def _is_still_well(damaged: list[bytes]) -> bool:
    """Whether nothing that is left shows a failure."""
    return not any(b"ERROR" in line or b"Traceback" in line or b"out of memory" in line or b"rror:" in line for line in damaged)
