"""The stand-in's log: `doctor` finds in it what it finds in a real one, and `plan --learn` reads its figures."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.catalogue.log_lines import LOG_LINES
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.findings import Severity
from plimsoll.standin.launch_log import failed_lines, log_lines, start_lines, uvicorn, want_of_memory
from plimsoll.standin.memory import oom_text
from plimsoll.units import GIB
from plimsoll.vllm.log_lines import measured_of
from tests.each import each, rows
from tests.standin.launches import PID, STAMP, launchable, log_of, text_of
from tests.standin.test_faults import CASES

CAPTURES = Path(__file__).parents[1] / "captures"
SOME = SimpleNamespace(running=3, waiting=1, kv_usage=0.25, prefix_hits=2, prefix_queries=5)
RATES = (813.5, 1869.2)
SHAPE = re.compile(r"\((APIServer|EngineCore|Worker\w*) pid=\d+\) (INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[\S+:\d+\] ")


@each("release", ["0.25.1", "0.32.0"])
@each(("words", "capture"), rows(CASES, "failed starts"))
def test_a_failed_start_is_found_as_the_real_one(words: str, capture: str, release: str) -> None:
    """`doctor` gives the log of a start that does not fit the code that it gives the real failure."""
    launch = launchable("--vllm", release, *words.split())
    assert launch.failure is not None
    real = diagnose([read_log(str(CAPTURES / f"vllm-{capture}"))]).findings[0].code
    found = diagnose([log_of(tuple(failed_lines(launch.log, launch.failure)), release)]).findings[0].code
    assert found == launch.failure.code == real


@pytest.mark.parametrize("release", ["0.11.0", "0.19.1", "0.25.1", "0.26.0", "0.32.0"])
@pytest.mark.parametrize("words", ["", "-tp 2", "--enforce-eager"])
def test_a_start_says_what_was_planned(words: str, release: str) -> None:
    """`plan --learn` reads out of the log the figures that the plan put in, to the two digits that vLLM prints."""
    log = launchable("--gpu", "H100", "--vllm", release, *words.split()).log
    found = measured_of(text_of(start_lines(replace(log, seconds=60.0), PID), release).encode().split(b"\n"))
    assert found.release == release
    assert found.weights_bytes is not None
    assert abs(found.weights_bytes - log.ledger.weights.value) < 0.02 * GIB
    assert found.kv_bytes is not None
    assert abs(found.kv_bytes - log.ledger.kv.value) < 0.02 * GIB
    assert found.kv_tokens == log.ledger.kv_plan.tokens
    assert found.max_concurrency == pytest.approx(log.ledger.kv_plan.max_concurrency, abs=0.006)
    if release in ("0.26.0", "0.32.0"):
        assert found.total_bytes is not None
        assert abs(found.total_bytes - log.ledger.card.total_bytes) < 0.02 * GIB
        assert found.activation_bytes is not None
        if release == "0.32.0":
            assert abs(found.activation_bytes - log.ledger.activation.value) < 0.03 * GIB


@pytest.mark.parametrize("release", ["0.25.1", "0.32.0"])
def test_a_healthy_server_has_nothing_to_say(release: str) -> None:
    """A start, an answer and a line of throughput: nothing that matters is found."""
    log = launchable("--gpu", "L4", "--vllm", release).log
    lines = (
        *start_lines(log, PID),
        uvicorn('127.0.0.1:40000 - "POST /v1/completions HTTP/1.1" 200 OK'),
        *log_lines(log, "stats", SOME, *RATES),
    )
    found = diagnose([log_of(lines, release)])
    assert all(finding.severity is not Severity.CRITICAL for finding in found.findings)


def test_lines_look_as_vllms() -> None:
    """Every line of the logger has process, level, time and place in front; until 0.30 uvicorn's have the process, too."""
    for release in ("0.25.1", "0.32.0"):
        text = text_of(start_lines(launchable("--gpu", "L4", "--vllm", release).log, PID), release)
        plain = [line for line in text.splitlines() if not SHAPE.match(line)]
        front = "(APIServer pid=100) " if release == "0.25.1" else ""
        assert plain == [
            f"{front}INFO:     Started server process [100]",
            f"{front}INFO:     Waiting for application startup.",
            f"{front}INFO:     Application startup complete.",
        ]
        assert STAMP in text


def test_the_line_of_throughput() -> None:
    """It is the line of the recorded server, digit for digit."""
    real = next(
        line
        for line in (CAPTURES / "vllm-0.25.1-h200-failures" / "healthy.log").read_text(encoding="utf-8").splitlines()
        if "Avg prompt" in line
    )
    idle = SimpleNamespace(running=0, waiting=0, kv_usage=0.0, prefix_hits=0, prefix_queries=1)
    said = log_lines(launchable("--gpu", "L4").log, "stats", idle, *RATES)[0].text
    assert real.endswith(said)


@pytest.mark.parametrize("words", ["", "-tp 2"])
@pytest.mark.parametrize("release", ["0.25.1", "0.32.0"])
@pytest.mark.parametrize(
    ("step", "capture"), [("forward", "forward.log"), ("logits", "logits.log"), ("neighbour", "neighbour.log")]
)
def test_a_death_is_found_as_the_real_one(step: str, capture: str, release: str, words: str) -> None:
    """Out of memory in a step: `doctor` gives the code of the recorded death."""
    launch = launchable("--gpu", "L4", "--vllm", release, *words.split())
    sizes = launch.config.sizes
    taken = 3 * GIB if step == "neighbour" else 0
    message = oom_text(
        total=sizes.total, graphs=sizes.graphs, tried=438 << 20, free=100 << 20, own=sizes.total - taken - (100 << 20),
        live=sizes.weights + sizes.kv_cache, left=20 << 20, neighbours=taken,
    )  # fmt: skip
    lines = (
        *start_lines(launch.log, PID),
        *log_lines(launch.log, "death", message, SOME, step == "logits"),
        uvicorn('127.0.0.1:40000 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'),
        *log_lines(launch.log, "after_death", PID),
    )
    found = diagnose([log_of(lines, release)])
    real = diagnose([read_log(str(CAPTURES / "vllm-0.25.1-h200-failures" / capture))])
    assert found.findings[0].code == real.findings[0].code
    assert found.memory_failure == real.memory_failure


@pytest.mark.parametrize("timeout", [0, 30])
@pytest.mark.parametrize("release", ["0.22.1", "0.25.1", "0.32.0"])
def test_a_stop_is_found_as_one(release: str, timeout: int) -> None:
    """Who was asked to stop has not crashed."""
    log = launchable("--gpu", "L4", "--vllm", release).log
    lines = (*start_lines(log, PID), *log_lines(log, "stop", timeout, 2, PID), *log_lines(log, "stopped"))
    found = diagnose([log_of(lines, release)])
    real = diagnose([read_log(str(CAPTURES / "vllm-0.32.0-failures" / "terminate.log"))])
    assert [finding.code for finding in found.findings] == [real.findings[0].code]


def test_a_start_that_is_made_to_fail() -> None:
    """A server that fits can fail for want of memory: its log is that of a device that others hold."""
    launch = launchable("--gpu", "L4")
    assert launch.failure is None
    failure = want_of_memory(launch.log)
    assert diagnose([log_of(failed_lines(launch.log, failure), "0.32.0")]).findings[0].code == failure.code


def test_lines_come_in_the_order_of_their_shares_without_secrets() -> None:
    """From the first moment of a start to its last; an API key does not stand in the log."""
    log = launchable("--gpu", "L4", "--api-key", "swordfish").log
    assert "swordfish" not in text_of(start_lines(log, PID), "0.32.0")
    shares = [line.share for line in start_lines(launchable("--gpu", "L4").log, PID)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_a_start_says_what_a_real_one_says_in_its_order() -> None:
    """Every line of the recorded start that carries a figure is in ours and in the same order, after one with the version."""
    real = (CAPTURES / "vllm-0.25.1-h200" / "base.log").read_text(encoding="utf-8", errors="replace")
    ours = text_of(start_lines(launchable("--gpu", "H200", "--vllm", "0.25.1").log, PID), "0.25.1")
    assert told_in(ours) == ["api-server-version", *told_in(real)]


def told_in(text: str) -> list[str]:
    """The names of the known lines, in the order in which each first appears, until the server is ready."""
    began = text.partition("Application startup complete")[0]
    places = {line.name: found.start() for line in LOG_LINES if (found := re.search(line.pattern, began))}
    return sorted(places, key=lambda name: places[name])
