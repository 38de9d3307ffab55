"""Hides what users wrote and what the model answered: prompts, messages, completions, token ids, pictures.

vLLM prints them when it logs requests (`prompt: '...'`, `output: '...'`), at DEBUG (tool parsers, JSON bodies) and in the
texts of some errors. What stays is what an operator needs: request ids, lengths, counts, sampling parameters. A list of token
ids leaves its length behind: `prompt_token_ids: [812 hidden]`.

A text that runs over several lines is hidden up to its end or to the next log record; line numbers stay as they were. When
in doubt a text is hidden. Everything is one pass over a line, with bounded quantifiers: hostile input costs no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

HIDDEN = "[hidden]"
MOST_LINES = 2_000  # a text that was never closed ends here
_MOST_BETWEEN = 64
_LONGEST_NAME = 64
_LONGEST_JSON = 1 << 20
_LONGEST_PREFIX = 400

_compiled = cache(re.compile)  # at first use: importing this module compiles nothing

# A record that says this holds text from there on, to its end.
_PHRASES = (
    "JSON body: ", "response_body={", "Received messages request ", "Convert to OpenAI request ",
    "Received Cohere v2 chat request ", "Converted Cohere v2 -> ChatCompletion: ", "Anthropic Messages Response: ",
    "Input prompt: ", "odel output: ", "odel_output: ", "delta_text: ", "cur_text = ", "] finding ", "Parsed tool call ",
    "Skipping text ", "Searching for diff between", "not been streamed yet: ", "tokens in arguments received: ", "uppressing: ",
    "using error placeholder: ", "when matching user input: ", "Failed to parse tool call during streaming: ",
    "against new ones: ", "diffing old arguments: ", "got arguments diff: ", "got diff ", "arg converter failed (extract): ",
    "Skipping multimodal part ", "no decodable soundtrack in ", "Session updated: ", "Error in streaming tool calls: ",
    "grammar rejected tokens ",
)  # fmt: skip
_BODY_STAYS = r"<(?:empty|binary_data)>\}|streaming_(?:started|complete: no_content)[:,] chunks=\d{1,9}\}"

# The end of a name that is given a value; the whole name is read backwards from there.
_NAME = (
    r"(?P<end>prompt_text|[Pp]rompts?|[Mm]essages|conversation|[Cc]ontent|text|[Oo]utputs?|arguments|completions?|response|reasoning|thinking"
    r"|query|documents|choices|delta|system|instructions|suffix|input|input_value|stop|bad_words|token_ids|tool_calls"
    r"|function_call|_url|input_audio|multi_modal_data|mm_inputs|mm_features|mm_kwargs|spec_decode_tokens|model_output)"
    r"(?P<close>\\{0,7}[\"'])?[ \t]{0,16}(?P<sep>=(?!=)|:(?![:=]))[ \t]{0,16}"
    r"|(?P<params>GuidedDecodingParams|StructuredOutputsParams)(?=\()"
)
_HINTS = ("rompt", "essages", "conversation", "ontent", "text", "utput", "arguments", "completion", "response", "reasoning",
          "thinking", "query", "documents", "choices", "delta", "system", "instructions", "suffix", "input", "stop",
          "bad_words", "token_ids", "tool_calls", "function_call", "_url", "multi_modal_data", "mm_", "spec_decode_tokens",
          "DecodingParams", "OutputsParams")  # fmt: skip
_ANY_LIST = frozenset(  # hidden whatever their value is made of, if it is quoted or in brackets
    "prompt prompts messages conversation tool_calls function_call image_url video_url audio_url input_audio multi_modal_data "
    "mm_inputs mm_features mm_kwargs scheduled_spec_decode_tokens choices delta stop bad_words content".split()
)
_KEYS_ONLY = frozenset(
    "input outputs response thinking query documents system instructions suffix completion completions".split()
)
_TEXTS = frozenset(
    "text output arguments reasoning reasoning_content model_output generated_text output_text delta_text full_text "
    "prompt_text current_text previous_text".split()
)
_KEPT_IDS = ("stop", "allowed", "eos", "bos", "pad", "special", "bad_words", "suppress", "forced", "image", "video", "audio")
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_QUOTE = r"[bBrRuUfF]{0,2}(?P<slashes>\\{0,7})(?P<mark>\"\"\"|'''|[\"'])"
_BRACKETS = r"\\{0,15}[\"']|[\[\](){}]"
_HIDDEN = r"\[(?:\d{1,9} )?hidden\]"
_HARMLESS = r"(?:None|True|False|null|true|false|[-+]?\d{1,12}(?:\.\d{1,12})?)(?=[\s,;)\]}.]|$)|<[\w .]{1,64}>(?=[\s,)\]}]|$)"

_OWN = (  # vLLM's own prefix, behind whatever collected the log
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d[.,\d]{0,8} "
    r"(?:\[[^\]\s]{1,200}:\d{1,6}\]|[\w./\-]{1,100}:\d{1,6}\]) ?"
)
_OTHER_RECORD = r"(?:\x1b\[[\d;]{0,12}m)?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:\x1b\[[\d;]{0,12}m)?:[ \t]{1,8}"
_STAMPED = r"\W{0,3}(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )"
_FRAME = r"[ \t]{0,16}File \"[^\"]{1,512}\", line \d{1,9}"
_ENCODED = r"(?<![A-Za-z0-9+/])[A-Za-z0-9+/]{256,}={0,2}"
_DATA_URI = r"data:[\w.+\-]{1,40}/[\w.+\-]{1,80}(?:;[\w=.\-]{1,60}){0,3},[^\s\"'<>)\]}]*"
_LINK = r"https?://[^\s\"'<>)\]}]{1,4096}"
_MEDIA = r"\.(?:png|jpe?g|gif|webp|bmp|tiff?|svg|mp[34]|wav|webm|mov|avi|mkv|flac|ogg|m4a|pdf)(?=[?#,;)\]}.:\\]|$)"
_HOME = (
    r"(?<![\w.~\-])(?:/var|/export|/usr|/mnt)?/(?:home|[Uu]sers)/[^/\s\"'<>:,;()\[\]{}|*?\\]{1,64}"
    r"|(?<![\w.~/\-])/root(?![\w.\-])"
)


class _Open(NamedTuple):
    """A text that did not end with its line."""

    mark: str  # the quote it is in; "" in a bracket, or where it runs to the end of its record
    slashes: int  # backslashes before that quote
    depth: int  # brackets that are open; 0 where there are none
    inner: str  # the quote that is open inside the brackets


def hide_user_text(text: str) -> str:
    """Return the text without what users wrote and models answered; doing it twice changes nothing more."""
    return "\n".join(hide_user_text_lines(text.split("\n")))


def hide_user_text_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield one line for each line, texts that run over several of them hidden up to the next record."""
    hider = _Hider()
    for line in lines:
        body = line.rstrip("\r\n")
        yield hider.line(body) + line[len(body) :]


def hide_homes(text: str) -> str:
    """Return the text with every home folder shown as `~`: the name of its owner is nobody's business."""
    if "/home/" not in text and "sers/" not in text and "/root" not in text:
        return text
    return _compiled(_HOME).sub("~", text)


class _Hider:
    """Goes through a log line by line and remembers a text that is still open."""

    def __init__(self) -> None:
        self._open: _Open | None = None
        self._paused = 0  # so many more lines may another process's record have come in between
        self._key = ""  # the prefix of the record that opened it
        self._was_stamped = False
        self._left = 0
        self._is_code = False  # the line before named a frame of a traceback: this one is its source

    def line(self, text: str) -> str:
        """The line without users' text."""
        if text[:1] == "{" and (inside := self._inside_json(text)) is not None:
            return _rest(_hide(inside, 0, is_code=False, opens=False)[0])
        return self._plain(text)

    def _inside_json(self, text: str) -> str | None:
        """A line of a log kept as JSON, with its message gone through; None where it is no such line."""
        import json

        try:
            record = json.loads(text) if len(text) <= _LONGEST_JSON else None
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict):
            return None
        key = next((key for key in ("log", "message", "msg", "MESSAGE") if isinstance(record.get(key), str)), None)
        if key is None:
            return text
        shown = "\n".join(self._plain(line) if line else line for line in record[key].split("\n"))
        if shown == record[key]:
            return text
        record[key] = shown
        separators = (", ", ": ") if '": ' in text[:4096] else (",", ":")
        return json.dumps(record, ensure_ascii=text.isascii(), separators=separators)

    def _plain(self, text: str) -> str:
        key, start = _prefix(text)
        if self._open is not None:
            if self._left > 0 and self._continues(key, text):
                self._left -= 1
                return _rest(self._continued(self._open, text, start))
            self._open = None
            self._paused = _MOST_BETWEEN if key and self._key else 0
        elif self._paused:
            self._paused -= 1
            if key == self._key:
                return text[:start] + HIDDEN
        is_code, self._is_code = self._is_code, _compiled(_FRAME).match(text, start) is not None
        is_code = is_code or text.startswith("    ", start)
        shown, opened = _hide(text, start, is_code=is_code, opens=bool(key))
        if opened and not is_code:
            self._open, self._key, self._left, self._paused = opened, key, MOST_LINES, 0
            self._was_stamped = _compiled(_STAMPED).match(text) is not None
        return _rest(shown)

    def _continues(self, key: str, text: str) -> bool:
        """Whether this line belongs to the record that is open: vLLM gives every line of a record the same prefix."""
        if key:
            return key == self._key
        if _compiled(_OTHER_RECORD).match(text):
            return False
        return bool(self._key) or self._was_stamped or not _compiled(_STAMPED).match(text)

    def _continued(self, opened: _Open, text: str, start: int) -> str:
        if not text[start:].strip():
            return text
        end: int | None = None
        if opened.mark:
            end = _closing(text, start, opened.mark, opened.slashes)
            end = end if end is None else end + opened.slashes + len(opened.mark)
        elif opened.depth:
            end, self._open = _bracket_end(text, start, opened)
        if end is None:
            return text[:start] + HIDDEN
        shown, self._open = _hide(text, end, is_code=False, opens=bool(self._key))
        return text[:start] + HIDDEN + shown[end:]


def _prefix(text: str) -> tuple[str, int]:
    """Which record the line says it is of, and where its message begins; nothing where it has no prefix of vLLM's."""
    own = _compiled(_OWN).search(text, 0, _LONGEST_PREFIX)
    if own is None or _compiled(r"[\"'{}]").search(text, 0, own.start()):
        return "", 0
    before = text[: own.start()]
    if "rompt" in before or [words for words in _PHRASES if words in before]:  # two records on one line: the first one counts
        return "", 0
    process = _compiled(r"pid=\d{1,10}").search(text, 0, own.start())
    return f"{process[0] if process else ''} {own[0].rstrip()}", own.end()


def _rest(text: str) -> str:
    """The line with what is known by its own shape hidden: data URIs, long runs of base64, links to pictures and sound."""
    if "data:" in text:
        text = _compiled(_DATA_URI).sub(f"data:{HIDDEN}", text)
    if len(text) >= 256:
        text = _compiled(_ENCODED).sub(HIDDEN, text)
    if "://" in text:
        text = _compiled(_LINK).sub(lambda link: HIDDEN if _compiled(_MEDIA).search(link[0].lower()) else link[0], text)
    return text


def _hide(text: str, start: int, *, is_code: bool, opens: bool) -> tuple[str, _Open | None]:
    """The line with the texts behind `start` hidden, and what is still open at its end."""
    shown, opened = _hide_once(text, start, is_code=is_code, opens=opens)
    for _ in range(4):  # hiding one text may complete the pattern of another
        if shown == text:
            break
        text = shown
        shown, more = _hide_once(text, start, is_code=is_code, opens=opens)
        opened = opened or more
    return shown, opened


def _hide_once(text: str, start: int, *, is_code: bool, opens: bool) -> tuple[str, _Open | None]:
    phrase = -1
    for words in [words for words in _PHRASES if words in text]:
        at = text.find(words, max(0, start - 2))
        if at >= 0 and not (words == "response_body={" and _compiled(_BODY_STAYS).match(text, at + len(words))):
            phrase = min(phrase, at + len(words)) if phrase >= 0 else at + len(words)
    limit = phrase if phrase >= 0 else len(text) + 1
    pieces: list[str] = []
    done = start
    opened: _Open | None = None
    if [hint for hint in _HINTS if hint in text]:  # much faster than asking the pattern
        names = _compiled(_NAME)
        at = start
        while opened is None and (match := names.search(text, at)) is not None and match.end() < limit:
            span = _span(text, match, is_code=is_code)
            if span is None:
                at = match.end()
                continue
            begin, end, shown, opened = span
            pieces += [text[done:begin], shown]
            at = done = end
    if opened is None and phrase >= 0 and done <= phrase < len(text):
        return text[:start] + "".join(pieces) + text[done:phrase] + HIDDEN, _Open("", 0, 0, "") if opens else None
    if opened is not None and not opened.mark and not opened.depth and not opens:
        opened = None
    return text[:start] + "".join(pieces) + text[done:], opened


_Span = tuple[int, int, str, _Open | None]


def _span(text: str, match: re.Match[str], *, is_code: bool) -> _Span | None:
    """What to hide behind this name: from, to, what to put there, what is left open."""
    at = match.end()
    if match["params"]:
        if _compiled(r"\((?:[^\"'\[({)]|\[hidden\]){0,2000}\)").match(text, at):  # nothing but numbers and names
            return None
        end, opened = _bracket_end(text, at, _Open("", 0, 0, ""))
        return at, end or len(text), f"({HIDDEN})", opened
    back = text[max(0, match.start() - _LONGEST_NAME) : match.start("end")]
    before = back.rstrip(_LETTERS)
    name = (back[len(before) :] + match["end"]).lower()
    is_key = match["close"] is not None and before[-1:] in ("'", '"')
    if name == "input_value":
        return _input_value(text, at)
    if not _is_meant(name, is_key=is_key, closed=match["close"] is not None) or _compiled(_HIDDEN).match(text, at):
        return None
    quote = _compiled(_QUOTE).match(text, at)
    if quote:
        return _quoted(text, quote)
    if text[at : at + 1] in ("[", "(", "{"):
        is_begun = is_code and not text[at + 1 :].strip()  # source that goes on below
        return _listed(text, at) if (is_key or _is_any(name)) and not is_begun else None
    if name.endswith("token_ids") and (call := _compiled(r"[\w.]{1,40}\((?=[\[\"'])(?!\[hidden\])").match(text, at)):
        return _listed(text, call.end() - 1)
    if name.endswith("prompt") and not is_code and not _compiled(_HARMLESS).match(text, at) and text[at:].strip():
        following = _compiled(r", \w{1,40}=").search(text, at) if match["sep"] == "=" else None
        end = following.start() if following else len(text)
        return at, end, HIDDEN, None if following else _Open("", 0, 0, "")
    return None


def _is_any(name: str) -> bool:
    return name in _ANY_LIST or name.endswith(("token_ids", "prompt"))


def _is_meant(name: str, *, is_key: bool, closed: bool) -> bool:
    """Whether what bears this name is a user's or a model's text."""
    if name.endswith("token_ids"):
        return not any(word in name for word in _KEPT_IDS)
    if name.endswith("prompt"):
        return not name.endswith("per_prompt")
    if name.endswith("_url"):
        return name in ("image_url", "video_url", "audio_url")
    if name in _KEYS_ONLY:
        return is_key
    if closed and not is_key:
        return False
    return name in _ANY_LIST or name in _TEXTS or (is_key and name.endswith(("_text", "_content", "_arguments", "_query")))


def _input_value(text: str, at: int) -> _Span | None:
    """What pydantic quotes of a value it refuses; the engine's own settings stay."""
    if text[at : at + 1] not in ("'", '"', "[", "{") or _compiled(_HIDDEN).match(text, at):
        return None
    end = text.find(", input_type=", at)
    return at, len(text) if end < 0 else end, HIDDEN, None


def _quoted(text: str, quote: re.Match[str]) -> _Span | None:
    begin, mark, slashes = quote.end(), quote["mark"], len(quote["slashes"])
    end = _closing(text, begin, mark, slashes)
    if end is None:
        return begin, len(text), f"{HIDDEN}{quote['slashes']}{mark}", _Open(mark, slashes, 0, "")
    return (begin, end, HIDDEN, None) if text[begin:end].strip() and text[begin:end] != HIDDEN else None


def _closing(text: str, at: int, mark: str, slashes: int) -> int | None:
    """Where the quote that was opened with so many backslashes is closed; a quote inside a word closes nothing."""
    found = text.find(mark, at)
    while found >= 0:
        before = text[max(at, found - 16) : found]
        count = len(before) - len(before.rstrip("\\"))
        after = text[found + len(mark) : found + len(mark) + 1]
        if ((count <= slashes) if slashes else count % 2 == 0) and not (after.isalnum() or after == "_"):
            return found - min(count, slashes)
        found = text.find(mark, found + 1)
    return None


def _listed(text: str, at: int) -> _Span | None:
    end, opened = _bracket_end(text, at, _Open("", 0, 0, ""))
    if end is None:
        return at, len(text), HIDDEN, opened
    inside = text[at + 1 : end - 1]
    if not inside.strip():
        return None
    is_flat = _compiled(r"[\d,\s\-]{1,9000000}").fullmatch(inside) is not None
    return at, end, f"[{inside.count(',') + 1} hidden]" if is_flat else HIDDEN, None


def _bracket_end(text: str, at: int, opened: _Open) -> tuple[int | None, _Open | None]:
    """Where the bracket is closed, strings and inner brackets skipped; or what is still open at the end of the line."""
    depth, inner, slashes = opened.depth, opened.inner, opened.slashes
    is_first = not opened.inner and not opened.depth
    for match in _compiled(_BRACKETS).finditer(text, at):
        found = match[0]
        if found[-1] in "\"'":
            count = len(found) - 1
            if is_first:  # JSON inside a string has a backslash before every quote
                slashes, is_first = count, False
            if inner and found[-1] != inner:
                continue
            if (count <= slashes) if slashes else count % 2 == 0:
                inner = "" if inner else found[-1]
        elif not inner:
            depth += 1 if found in "[({" else -1
            if depth <= 0:
                return match.end(), None
    return None, _Open("", slashes, depth, inner)
