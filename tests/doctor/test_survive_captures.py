"""Real H200 servers whose requests exceeded the card: contained, refused at the door, or neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from plimsoll.cli.main import main
from plimsoll.doctor.read.text import read_log
from plimsoll.doctor.rules.diagnose import diagnose
from plimsoll.findings import Code, Severity

FOLDER = Path(__file__).parents[1] / "captures" / "vllm-0.25.1-h200-survive"


def path(name: str) -> str:
    """The log of this run."""
    return str(FOLDER / f"{name}.log")


@pytest.mark.parametrize(
    ("name", "site", "aborted"),
    [
        ("neighbour-small-graphs-1-contained-1", "at forward", ()),
        (
            "lora-adapter-eager-0-contained-2",
            "at adapter",
            ("cmpl-b19722e4c53664ad-0-b56dca6b", "cmpl-8753a7778d92dc60-0-a4cadf20"),
        ),
        (
            "multimodal-pictures-eager-0-contained-1",
            "at encoder",
            ("chatcmpl-be3a5e31612b5593-a8fe3ef6", "chatcmpl-a48e3468a7128a2e-8889efb5", "chatcmpl-a5a45f03bc0254af-ae668777"),
        ),
    ],
)
def test_a_server_that_contained_its_failures_is_called_alive(name: str, site: str, aborted: tuple[str, ...]) -> None:
    """Memory ran out, the server lives, and the requests that this cost are named: the first ones and the last."""
    found = diagnose([read_log(path(name))])
    assert [finding.code for finding in found.findings] == [Code.RUNTIME_CONTAINED]
    assert found.memory_failure is True
    (finding,) = found.findings
    assert finding.severity is Severity.WARNING
    assert site in finding.because
    assert "the server lives" in finding.because
    told = [one.text for one in finding.evidence if "survive: aborted request" in one.text]
    assert [text.partition("aborted request ")[2].partition(":")[0] for text in told] == list(aborted)


def test_a_server_whose_door_refused_requests_has_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM prints a traceback for each refused stream; the server serves, and doctor ends with 0."""
    name = path("lora-adapter-eager-0-door-1")
    found = diagnose([read_log(name)])
    assert (found.memory_failure, found.findings) == (False, ())
    assert main(["doctor", name]) == 0
    assert "Nothing wrong was found" in capsys.readouterr().out


def test_a_server_without_plimsoll_died_of_the_same_requests() -> None:
    """The request wanted the prompt's log-probabilities; the step that ran out was a forward pass, as its frames say."""
    found = diagnose([read_log(path("logits-recorded-small-eager-0-plain-1"))])
    assert found.memory_failure is True
    assert found.findings[0].code is Code.RUNTIME_FORWARD
    assert found.findings[0].severity is Severity.CRITICAL
