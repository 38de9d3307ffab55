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


def test_methods_have_their_arguments() -> None:
    """All kinds of arguments are named, and those that a function takes beyond them are marked."""
    worker = _shape().classes["Worker"]
    assert worker.methods == {"__init__": ("self", "config", "local", ANY), "errored": ("self",)}
    assert _shape().functions == {"helper": ("a", "b", "c")}


def test_attributes_are_fields_and_what_is_set_on_self() -> None:
    """Nothing that is set on another object or is only local counts."""
    assert _shape().classes["Worker"].attributes == {"rank", "KIND", "device", "other", "model"}
    assert "seen" in _shape().assigned


def test_words_come_from_code_alone() -> None:
    """A name that a comment or a longer text speaks of is not there."""
    words = _shape().words
    assert {"vllm.general_plugins", "load_general_plugins", "GROUP"} <= words
    assert not words & {"gone_word", "lost_word"}


@given(st.text(max_size=200) | st.sampled_from(["(" * 3000, "\0", "class A:\n", "x = " + "-" * 5000 + "1", "\ud800"]))
def test_any_text_gives_a_shape_or_nothing(text: str) -> None:
    """Whatever lies in a folder that is called vllm, reading it does not fail."""
    assert shape_of(text) is None or isinstance(shape_of(text), FileShape)
