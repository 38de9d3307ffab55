"""Reading what a Python file defines."""

from __future__ import annotations

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.vllm.extension_points import ANY, FileShape, shape_of

TEXT = '''
    """A docstring speaks of gone_word."""
    # and a comment of lost_word
    from vllm.plugins import load_general_plugins
    GROUP = "vllm.general_plugins"
    class Worker(Base):
        rank: int = 0
        KIND = "gpu"
        def __init__(self, config, *, local: bool, **others):
            self.device, self.other = None, 1
            self.model: object = None
            config.seen = 1
            local_name = 2
        @property
        async def errored(self): ...
    def helper(a, /, b, *rest, c): ...
'''


def _shape() -> FileShape:
    shape = shape_of(textwrap.dedent(TEXT))
    assert shape is not None
    return shape


def test_a_source_is_read_for_what_its_code_has() -> None:
    """Methods with all kinds of arguments, fields and what is set on self; no word of a comment or a text."""
    worker = _shape().classes["Worker"]
    assert worker.methods == {"__init__": ("self", "config", "local", ANY), "errored": ("self",)}
    assert _shape().functions == {"helper": ("a", "b", "c")}
    assert _shape().classes["Worker"].attributes == {"rank", "KIND", "device", "other", "model"}
    assert "seen" in _shape().assigned
    words = _shape().words
    assert {"vllm.general_plugins", "load_general_plugins", "GROUP"} <= words
    assert not words & {"gone_word", "lost_word"}


@given(st.text(max_size=200) | st.sampled_from(["(" * 3000, "\0", "class A:\n", "x = " + "-" * 5000 + "1", "\ud800"]))
def test_any_text_gives_a_shape_or_nothing(text: str) -> None:
    """Whatever lies in a folder that is called vllm, reading it does not fail."""
    assert shape_of(text) is None or isinstance(shape_of(text), FileShape)
