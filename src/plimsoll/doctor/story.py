"""A log as a story: the server's lives, how far each came, what was raised, and which telling words were said where."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from plimsoll.doctor.steps import Progress
from plimsoll.doctor.tracebacks import Raised, raised_in
from plimsoll.domain.log import Line, Log
from plimsoll.domain.user_text import hide_user_text_lines
from plimsoll.engine.failure_texts import TEXTS, Role, Text

_compiled = cache(re.compile)

# What each of these lines proves. The newest wording first; all are vLLM's own but uvicorn's two.
MILESTONES: tuple[tuple[str, Progress], ...] = (
    ("API server version", Progress.BEGUN),
    ("LLM engine (v", Progress.BEGUN),
    ("non-default args: ", Progress.BEGUN),
    ("Starting to load model", Progress.LOADING),
    ("Loading safetensors checkpoint shards", Progress.LOADING),
    ("Loading pt checkpoint shards", Progress.LOADING),
    ("Using model weights format", Progress.LOADING),
    ("Loading weights took", Progress.LOADED),
    ("Model loading took", Progress.LOADED),
    ("Loading model weights took", Progress.LOADED),
    ("Available KV cache memory", Progress.MEASURED),
    ("KV cache size: ", Progress.MEASURED),
    ("CPU blocks: ", Progress.MEASURED),
    ("num_gpu_blocks is: ", Progress.MEASURED),
    ("Maximum concurrency for", Progress.MEASURED),
    ("the rest of the memory reserved for KV Cache", Progress.MEASURED),
    ("Capturing the model for CUDA graphs", Progress.CAPTURING),
    ("Capturing CUDA graph", Progress.CAPTURING),
    ("Capturing cudagraphs for decoding", Progress.CAPTURING),
    ("Graph capturing finished", Progress.CAPTURED),
    ("init engine (profile", Progress.CAPTURED),
    ("Application startup complete", Progress.SERVING),
    ("Uvicorn running on", Progress.SERVING),
    ("Avg prompt throughput", Progress.SERVING),
    ("Processed prompts:", Progress.SERVING),
    ('"POST /v1/', Progress.SERVING),
    ("Available routes are", Progress.CAPTURED),
    ("Received request ", Progress.SERVING),
    ("Added request ", Progress.SERVING),
)
_EXCEPTION = r"(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,80}(?:Error|Exception): "
_BEGINS = (
    "API server version",
    "Initializing a V1 LLM engine",
    "Initializing a V0 LLM engine",
    "Initializing an LLM engine",
    "█▄█▀",
)
MOST_HITS = 20_000
MOST_LIVES = 50  # the last ones; those before them are one


class Hit(NamedTuple):
    """A telling text, and the line it stands in."""

    text: Text
    at: int


class Life(NamedTuple):
    """One server from its first words to its last."""

    first: int
    end: int  # one past its last line


class Story(NamedTuple):
    """What one log tells, before anything is judged."""

    log: Log
    raised: list[Raised]
    hits: list[Hit]
    marks: list[tuple[int, Progress]]
    lives: list[Life]
    serving: list[int]  # the lines that show work being done

    def progress_at(self, index: int, process: str = "") -> Progress:
        """How far the server had come before this line: by its own process where that has spoken of it, else by any."""
        life = self.life_at(max(0, index - 1))
        if bisect_left(self.serving, index) > bisect_left(self.serving, life.first):
            return Progress.SERVING
        reached = self._marked(life.first, index)
        own = [step for at, step in reached if process and self.log.lines[at].process == process]
        return max(own or [step for _, step in reached], default=Progress.UNKNOWN)

    def life_at(self, index: int) -> Life:
        """The life this line belongs to."""
        return self.lives[max(0, bisect_right(self.lives, index, key=lambda life: life.first) - 1)]

    def serves_after(self, index: int) -> bool:
        """Whether work was still being done well after this line, in the same life."""
        life = self.life_at(index)
        later = bisect_left(self.serving, life.end) - bisect_right(self.serving, index)
        return later >= 2 or any(
            '" 200' in self.log.lines[at].text and "POST" in self.log.lines[at].text
            for at in range(index + 20, min(life.end, index + 2_000))
        )

    def _marked(self, first: int, end: int) -> list[tuple[int, Progress]]:
        return self.marks[bisect_left(self.marks, (first,)) : bisect_left(self.marks, (end,))]


def read_story(log: Log, texts: Sequence[Text] = TEXTS) -> Story:
    """Everything the judge needs, in one pass over the lines."""
    log = log._replace(lines=_without_users_words(log.lines))
    raised = raised_in(log.lines)
    hits = list(_hits(log.lines, texts))
    marks = list(_marks(log.lines))
    hits += _wrapped_hits(raised, {hit.at for hit in hits}, texts)
    hits.sort(key=lambda hit: hit.at)
    serving = [at for at, step in marks if step is Progress.SERVING]
    return Story(log, raised, hits, marks, _lives(log.lines, hits), serving)


_USERS = ("Received request ", "prompt: '", 'prompt: "', "Generated response")
_RECORD = "INFO 01-01 00:00:00 [a.py:1] "  # what a record of vLLM's begins with: it ends a text that was never closed


def _without_users_words(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines without what users wrote: a prompt may quote a traceback, and it is nobody's failure."""
    if not any(word in line.text for line in lines for word in _USERS):
        return lines
    marked = (f"{_RECORD}{line.text}" if line.level else line.text for line in lines)
    return [
        line._replace(text=text.removeprefix(_RECORD)) for line, text in zip(lines, hide_user_text_lines(marked), strict=True)
    ]


def _wrapped_hits(raised: Sequence[Raised], told: set[int], texts: Sequence[Text]) -> Iterator[Hit]:
    """Texts that a terminal broke over several lines: found in the message put together again."""
    for one in raised:
        if "\n" in one.message and one.at not in told and not any(at in told for at in range(one.at, one.at + 4)):
            whole = Line(None, one.process, "", None, f"{one.kind}: " + " ".join(one.message.split()))
            yield from (Hit(text, one.at) for text in texts if text.needle in whole.text and _counts(text, whole))


def _present(lines: Sequence[Line], needles: Sequence[str]) -> set[str]:
    """Those needles that occur at all: most of them do not, and then no line need be asked."""
    found: set[str] = set()
    step = 4_000
    for start in range(0, len(lines), step):
        block = "\n".join(line.text for line in lines[start : start + step])
        found.update(needle for needle in needles if needle not in found and needle in block)
    return found


def _hits(lines: Sequence[Line], texts: Sequence[Text]) -> Iterator[Hit]:
    present = _present(lines, [text.needle for text in texts])
    texts = [text for text in texts if text.needle in present]
    if not texts:
        return
    found = 0
    for index, line in enumerate(lines):
        for text in texts:
            if text.needle in line.text and _counts(text, line):
                yield Hit(text, index)
                found += 1
        if found >= MOST_HITS:
            return


def _counts(text: Text, line: Line) -> bool:
    is_quiet = line.level in ("DEBUG", "INFO", "WARNING")
    if is_quiet and line.level != "DEBUG":
        # Who logs another program's output line by line calls all of it INFO, its exceptions too.
        is_quiet = _compiled(_EXCEPTION).match(line.text) is None
    if is_quiet and not text.any_level and text.role is not Role.NOISE:
        return False
    return text.pattern is None or _compiled(text.pattern).search(line.text) is not None


def _marks(lines: Sequence[Line]) -> Iterator[tuple[int, Progress]]:
    present = _present(lines, [needle for needle, _ in MILESTONES])
    known = [(needle, step) for needle, step in MILESTONES if needle in present]
    for index, line in enumerate(lines):
        for needle, step in known:
            if needle in line.text and not line.text.startswith("  "):
                yield index, step
                break


def _lives(lines: Sequence[Line], hits: Sequence[Hit]) -> list[Life]:
    """Split where a server introduces itself after another has come to its end.

    The API server speaks first and its engine after it: the engine's introduction begins a life of its own only where no
    API server has spoken since the last one began.
    """
    ends = [hit.at for hit in hits if hit.text.role in (Role.DEATH, Role.STOP, Role.CAUSE, Role.OUT_OF_MEMORY)]
    over = [hit.at for hit in hits if hit.text.role is Role.STOP]
    starts, introduced, by_api = [0], False, False
    for index, line in enumerate(lines):
        if not any(needle in line.text for needle in _BEGINS):
            continue
        is_api = "LLM engine" not in line.text
        place = bisect_left(ends, starts[-1])
        failed = place < len(ends) and ends[place] < index
        was_stopped = bisect_left(over, index) > bisect_left(over, starts[-1])
        if failed and (is_api or (introduced and (not by_api or was_stopped))):
            starts.append(index)
            by_api = False
        introduced, by_api = True, by_api or is_api
    starts = starts[-MOST_LIVES:] if len(starts) <= MOST_LIVES else [0, *starts[-MOST_LIVES:]]
    return [Life(first, end) for first, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
