"""The functions that tell a failed step, against the sources of vLLM's releases."""

from __future__ import annotations

from plimsoll.vllm import versions
from plimsoll.vllm.failure_texts import STEP_FRAMES, seen_in
from tests.each import each

FUNCTIONS = sorted({function for _, functions in STEP_FRAMES for function in functions})


@each("function", FUNCTIONS)
def test_every_function_is_defined_in_a_release(function: str) -> None:
    """No step is known by a function that vLLM never had."""
    assert seen_in(function)


def test_every_step_is_known_in_the_newest_release() -> None:
    """No function means two steps, and no row belongs to one that is gone."""
    assert set(versions.rows("frames")) == set(FUNCTIONS)
    assert seen_in("no_such_function") == ()
    newest = list(versions.wheels())[-1]
    for name, functions in STEP_FRAMES:
        assert any(str(seen_in(function)[-1].last) == newest for function in functions), name
    assert len(FUNCTIONS) == sum(len(functions) for _, functions in STEP_FRAMES)
