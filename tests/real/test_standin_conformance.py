"""The stand-in beside the real vLLM 0.32.0: the same script against both, and no difference but those allowed with a reason."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.conformance.__main__ import CAPTURES
from lab.conformance.compare import ALLOWED, beyond, differences, unused
from lab.conformance.phases import PARTS, tidied
from lab.conformance.servers import KINDS
from tests.real.conftest import need_vllm


@pytest.mark.timeout(600)  # three starts of the real engine, and clients that wait for it to end
@pytest.mark.parametrize("part", PARTS)
def test_the_standin_answers_as_the_engine_does(part: str) -> None:
    """Answers, streams, metrics, counters, drains, signals, deaths and exit codes agree wherever no reason says otherwise.

    And the recording in the repository is still what the engine says.
    """
    need_vllm()
    with ThreadPoolExecutor(2) as both:  # each waits for its own server most of the time
        real, standin = ({part: tidied(told)} for told in both.map(PARTS[part], (KINDS["real"], KINDS["standin"])))
    found = differences(real, standin)
    left = beyond(found)
    assert not left, "\n".join(str(one) for one in left)
    assert not unused(found, [rule for rule in ALLOWED if rule.where.startswith(f"{part}/")])
    changed = differences({part: json.loads((Path(CAPTURES) / "real.json").read_text(encoding="utf-8"))[part]}, real)
    assert not changed, "\n".join(str(one) for one in changed)
