"""What tools print (texts.txt), and a pasted text as the reader of logs hands it over: numbered lines, nobody named."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from hypothesis import strategies as st

from plimsoll.doctor.rules.log_text import Log, LogLine

_TEXTS = Path(__file__).with_name("texts.txt").read_text(encoding="utf-8").split("\n== ")[1:]


def printed(*names: str) -> list[str]:
    """These texts: one of several lines begins and ends with an empty one."""
    texts = dict(text.strip("\n").split("\n", 1) for text in _TEXTS)
    return [f"\n{texts[name]}\n" if "\n" in texts[name] else texts[name] for name in names]


def pasted(text: str, source: str = "pasted.txt") -> Log:
    """The text as a log, its common indentation taken off."""
    lines = dedent(text).strip("\n").split("\n")
    return Log(source, [LogLine(number, "", "", None, line) for number, line in enumerate(lines, 1)])


def scrambled(*texts: str) -> st.SearchStrategy[Log]:
    """Lines of real shape, cut, repeated and mixed with arbitrary text: what a hostile or broken file looks like."""
    known = [line for text in texts for line in dedent(text).strip("\n").split("\n")]
    cut = st.builds(lambda line, start, end: line[start:end], st.sampled_from(known), st.integers(0, 20), st.integers(0, 200))
    anything = st.one_of(st.sampled_from(known), cut, st.text(max_size=80))
    return st.lists(anything, max_size=40).map(lambda lines: pasted("\n".join(lines)))
