"""Faults of our own: counted each time, logged the first time in a place, without what the error says."""

from __future__ import annotations

import logging

import pytest

from plimsoll.inside.faults import FaultCounts


def test_each_is_counted_and_the_first_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """By place; the log has the kind and the line, not the text, which may be a user's."""
    faults = FaultCounts()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            try:
                raise KeyError("a user's prompt")
            except KeyError as error:
                faults.note("here", error)
        faults.note("there", ValueError())
        faults.say("elsewhere", "said")
        faults.say("elsewhere", "said")
    messages = [record.getMessage() for record in caplog.records]
    assert {record.name for record in caplog.records} == {"vllm.plimsoll"}, "printed in vLLM's own format"
    assert faults.counts == {"here": 3, "there": 1, "elsewhere": 2}
    assert len(messages) == 3
    assert "KeyError at test_faults.py:" in messages[0]
    assert "prompt" not in "".join(messages)
