"""What a telling text is: its words, its part in the story, and where it was seen."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from plimsoll.domain.finding import Code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.engine.tables import Span


class Role(StrEnum):
    """What a text does in the story."""

    CAUSE = "cause"  # names what went wrong
    OUT_OF_MEMORY = "out-of-memory"  # an allocation failed: which step, the traceback tells
    STOP = "stop"  # somebody ended it on purpose
    DEATH = "death"  # the end, never the reason
    NOISE = "noise"  # harmless, whatever it says


class Text(NamedTuple):
    """One text and its meaning."""

    name: str
    needle: str
    role: Role
    code: Code | None = None
    pattern: str | None = None
    speaker: str = "vllm"
    fragment: str | None = None  # of vLLM's source; by default the needle where vLLM speaks
    any_level: bool = False  # counts also in lines that call themselves INFO or WARNING
    says: str = ""  # for people, where the code's own title would say too little

    def of_source(self) -> str:
        """What to look for in vLLM's source."""
        return self.needle if self.fragment is None else self.fragment

    def seen_in(self) -> tuple[Span, ...]:
        """The releases whose source holds this text."""
        from plimsoll.engine.tables import spans_of  # a table of JSON: not read to judge a log

        return spans_of("failure_texts", self.name)
