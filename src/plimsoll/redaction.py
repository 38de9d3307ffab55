"""Hides secrets: everything plimsoll prints, stores or sends passes through here first.

A secret is known by the name it is given (HF_TOKEN=..., "api_key": ..., Authorization: ...), by the place it stands in
(scheme://user:password@host) or by its own shape (hf_..., a JWT, a private key). All of it becomes `[redacted]`.

When in doubt a value is hidden. Left alone are the look-alikes an operator needs: counts of tokens, special tokens,
`cache_key` and `public_key` (nothing opens with them), a bare `key`, names ending in a place or a kind (`token_file`,
`secretName`), and values that hold no secret: None, true, `$HF_TOKEN`, a flag's own placeholder in a help text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from heapq import merge
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

REDACTED = "[redacted]"

Span = tuple[int, int, str]  # from, to, what to put there

_compiled = cache(re.compile)  # at first use: importing this module compiles nothing
# Lists of words. `speech`: a `..._token` with one of these is a piece of text, never a credential. `phrases`: a record that
# says one holds text from there on, to its end. `clues`: a line without any of them names no text of a user's. `any_list`:
# hidden whatever their value is made of, if it is quoted or in brackets.
_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_KEY_OF, _TOKENS_OF, _LOGIN_OF, _HARMLESS_LAST, _SPEECH, _ANY_LIST, _KEYS_ONLY, _TEXTS = (
    frozenset(_WORDS[name])
    for name in ("key_of", "tokens_of", "login_of", "harmless_last", "speech", "any_list", "keys_only", "texts")
)
_PHRASES, _CLUES, _KEPT_IDS = (tuple(_WORDS[name]) for name in ("phrases", "clues", "kept_ids"))

# Every quantifier is bounded or ends its pattern, no pattern starts again inside what it has taken, and a span once hidden
# is not searched again: that keeps hostile input linear. (Possessive quantifiers would say it better, but Python 3.11.0 to
# 3.11.4 match them wrongly, and a redaction that depends on a patch release leaks.) Patterns begin with literal text where
# they can: that is fast.
_NAME_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789_-."
_LONGEST_NAME = 64
_LONGEST_LIST = 4096
_HINTS = ("token", "key", "secret", "pass", "pwd", "credential", "auth", "cookie", "sig", "watermark")
_ASSIGNMENT = (  # what follows a hint, when it is a name that is given a value
    r"[a-z0-9_\-]{0,48}(?P<close>\\{0,4}[\"'`]?\]?)"
    r"(?:[ \t]{0,16},?\s{0,64}\\{0,4}[\"']?value\\{0,4}[\"']?[ \t]{0,16}[:=][ \t]{0,16}"  # {name: N, value: V}
    r"|(?P<pair>[ \t]{0,16},\s{0,64}(?=b?[\\\"']))"  # ('N', 'V')
    r"|(?P<sep>[ \t]{0,16}(?:=>|:=|==|=|:(?!:|//))[ \t]{0,64}))"
)
_OPENS_LINE = r"[ \t]{0,64}(?:- {1,8})?(?:export )?[\w.\-]{1,64}(?:[ \t]{1,16}=|[ \t]{0,16}:)[ \t]{1,64}"
_FLAG = r"--(?<![A-Za-z0-9_\-]--)[A-Za-z][A-Za-z0-9_.\-]{1,64}(?=[\s\0\"'\\])"
_NEXT_WORD = (  # of a JSON or Python list, a YAML list, a command line
    r"(?:\\{0,4}[\"']\s{0,64},\s{0,64}(?=\\{0,4}[\"'])"
    r"|[\"']?(?P<item>[ \t]{0,16}\r?\n[ \t]{0,64}-[ \t]{1,16})"
    r"|(?P<below>(?<=[\w\-])[ \t]{0,16}\r?\n[ \t]{1,64}(?=\S+[ \t]{0,16}(?:\r?\n|$)))"  # each word on a line of its own
    r"|(?P<closing>[\"']?)[ \t\0]{1,64}(?:\\\r?\n[ \t]{0,64})?)(?![\s\-|&;<>#)])(?!\\{0,4}[\"']-)"
)
_QUOTE = r"[bBrRuUfF]{0,2}(\\{0,4})(\"\"\"|'''|[\"'`])"
_ABOUT_A_FILE = (
    r"(?:\[errno \d{1,4}\] )?(?:no such file|permission denied|is a directory|not a directory|is not |cannot be |could not be "
    r"|does not exist|not found|file exists|input/output error|read-only file|file name too long|too many levels)"
)
_WORD = r"[^\s\0]*"
_LINE = r"[^\n]*"
_PARAMETER = r"[^\s\0&#\"'<>]*"
_BRACKETS = r"\"(?:[^\"\\]|\\.){0,4096}\"|'(?:[^'\\]|\\.){0,4096}'|[\[({]|[\])}]"
_CHILD = r"\r?\n(?P<indent>[ \t]{0,256})(?P<dash>- {1,8})?(?P<value>[^\n]*)"
_MAPPING = r"[\w.\"'\-]{1,128}[ \t]{0,16}:(?:\s|$)"

_PRIVATE_KEY = (  # to its end, or as far as one that was cut off looks like one
    r"(-----BEGIN [A-Z0-9 ]{0,32}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:[^\-]|-(?!----)){0,16384}-----END [A-Z0-9 ]{0,48}-----|[A-Za-z0-9+/=\s\\]*))"
)

# A needle to look for, and the pattern whose first group is the secret.
_SHAPES: tuple[tuple[str, str], ...] = (
    *(
        (start, f"({re.escape(start)}[A-Za-z0-9{more}]{{{least},}})")
        for kind, more in (("plain_tokens", ""), ("dashed_tokens", r"_\-"))
        for start, _, least in (token.rpartition(":") for token in _WORDS[kind])
    ),
    ("sk-", r"(sk-(?:(?<![A-Za-z0-9]sk-)|(?<=\\[nrt]sk-)|(?<=\dmsk-))[A-Za-z0-9_\-]{16,})"),
    ("gh", r"(gh[opsur]_[A-Za-z0-9]{20,})"),
    ("gl", r"(gl(?:agent|cbt|dt|ft|imt|pat|ptt|rt|soat)-[A-Za-z0-9_\-]{16,})"),
    ("xox", r"(xox[abeprs]-[A-Za-z0-9\-]{10,})"),
    ("SG.", r"(SG\.[A-Za-z0-9_\-]{16,32}\.[A-Za-z0-9_\-]{32,})"),
    ("eyJ", r"(eyJ[A-Za-z0-9_\-]{16,}(?:\.[A-Za-z0-9_\-]*){0,4}=*)"),
    ("hooks.slack.com/", r"hooks\.slack\.com/[a-z]{1,16}/([A-Za-z0-9/]{20,})"),
    ("/api/webhooks/", r"/api/webhooks/([0-9]{8,32}/[A-Za-z0-9_\-]{20,})"),
    ("password", r"login\s{1,64}\S{1,256}\s{1,64}password\s{1,64}(\S+)"),  # .netrc
    ("login", r"login(?:[ \t]{1,8}[^\s|;&]{1,256}){0,6}?[ \t]{1,8}-p[ \t=]{0,8}(\S+)"),
    ("sshpass", r"sshpass[ \t]{1,8}-p[ \t]{0,8}(\S+)"),
    ("from-literal", r"from-literal[ =][\"']?[\w.\-]{1,256}=([^\s\"']+)"),
    ("configure set ", r"configure set \w{0,64}(?:secret|token|key)\w{0,32} {1,8}(\S+)"),
    ("earer ", r"earer (?=[\w.~+/=\-]{0,64}[0-9]|[\w.~+/=\-]{20})([\w.~+/=\-]{8,})"),
    ("-u", r"-u(?<!\S-u)[ \t]{1,8}(?!\d{1,9}:\d{1,9}(?:\s|$))(\"[^\":]{1,256}:[^\"\n]+|'[^':]{1,256}:[^'\n]+)"),
    ("-u", r"-u(?<!\S-u)[ \t]{1,8}(?!\d{1,9}:\d{1,9}(?:\s|$))([^\s:\"']{1,256}:\S+)"),
    ("user", r"user(?<=-user)[ =](?!\d{1,9}:\d{1,9}(?:\s|$))([^\s:]{1,256}:\S+)"),
    ("ENV ", r"ENV \w{0,64}(?:TOKEN|API_KEY|SECRET|PASSWORD|ACCESS_KEY)\w{0,16} {1,8}(?![ =])([^\n]+)"),
    ("PRIVATE KEY", _PRIVATE_KEY),
)

# Words of a name, split at case, dots, dashes and underscores.
_HIDDEN_WORD = (
    r"\w*(?:password|passwd|passphrase|passcode|secrets?|credentials?|authorization|cookies?|api_?keys?|secretkey"
    r"|privatekey|accesskey|authtoken|accesstoken|sshpass)"
)


def redact(text: str) -> str:
    """Return the text with every secret in it replaced by `[redacted]`; doing it twice changes nothing more."""
    for _ in range(8):  # nearly always two: hiding one secret may complete the pattern of the next
        plain = text.encode("ascii", "replace").decode()  # the same positions, and several times faster to search
        found = [*_named(text, plain.lower()), *_flag_values(text, plain), *_shaped(plain), *_userinfo(text)]
        spans = sorted(span for span in found if text[span[0] : span[1]] != span[2])
        if not spans:
            break
        pieces, done = [], 0
        for start, end, shown in spans:
            if start >= done:  # spans that overlap become one
                pieces += [text[done:start], shown]
            done = max(done, end)
        text = "".join(pieces) + text[done:]
    return text


def redact_value(name: str, value: str) -> str:
    """Return what may be shown of an environment variable's or a configuration key's value."""
    if _is_secret(name):
        return value if _is_harmless(name, value) else REDACTED
    return redact(value)


def redact_words(words: Sequence[str]) -> list[str]:
    """Return a command line, given word by word, with its secrets hidden and every word in its place."""
    shown: list[str] = []
    owner = before = ""  # the flag whose values are being hidden; the word before this one
    for word in words:
        script = before.startswith("-") and not before.startswith("--") and before.endswith("c")  # sh -c, bash -lc
        assigned = _compiled(r"((?:--?[\w.\-]{1,64}=|-e)?)(-{0,2}[\w.\-]{1,64})=(.*)", re.DOTALL).fullmatch(word)
        if owner and not (word.startswith("-") and len(word) > 1):
            shown.append(word if _is_harmless(owner, word) else REDACTED)
            owner = owner if _takes_many(owner) else ""
        elif _is_secret_flag(word):
            owner = word
            shown.append(word)
        else:
            owner = ""
            if assigned and not script and (_is_secret(assigned[2]) or _is_secret_flag(assigned[2])):
                hidden = assigned[3] if _is_harmless(assigned[2], assigned[3]) else REDACTED
                shown.append(f"{assigned[1]}{assigned[2]}={hidden}")
            elif before in ("-u", "--user", "--proxy-user") and _compiled(r"(?!\d+:\d+$)[^:]*:.+").fullmatch(word):
                shown.append(REDACTED)
            else:
                shown.append(redact(word))
        before = word
    return shown


def _shaped(text: str) -> Iterator[Span]:
    """Tokens known by how they look, wherever they stand."""
    for needle, pattern in _SHAPES:
        if needle in text:
            for match in _compiled(pattern).finditer(text):
                if REDACTED not in match[1]:
                    yield match.start(1), match.end(1), REDACTED


def _userinfo(text: str) -> Iterator[Span]:
    """What stands between `//` and `@` in a URL; found from the rarer of the two."""
    at = text.find("@")
    while at >= 0:
        last = _end(r"@(?:[^\s\"'<>/?#@]{0,256}@){0,4}", text, at)  # a password may hold an @ itself
        start = text.rfind("//", max(0, at - 512), at) + 2
        user, _, password = text[start:at].partition(":")
        if start >= 2 and user + password not in ("git", REDACTED) and not text.startswith("@sha256:", at):
            is_path = _compiled(r"[/?#\[]").search(user) or _compiled(r"\d{1,5}[/?#]").match(password)
            if not is_path and not _compiled(r"[\s\"'<>]").search(text, start, at):
                yield start, last - 1, REDACTED
        at = text.find("@", last)


def _named(text: str, lowered: str) -> Iterator[Span]:
    """Values of names that say secret: environment, YAML, JSON, TOML, ini, HTTP headers, query parameters, Python."""
    done = 0
    hits = (_compiled(hint + _ASSIGNMENT).finditer(lowered) for hint in _HINTS if hint in lowered)
    for match in merge(*hits, key=re.Match.start):  # one pattern for each hint is twice as fast as one for all
        if match.start() < done:
            continue
        before = lowered[max(0, match.start() - _LONGEST_NAME) : match.start()]
        start = match.start() - len(before) + len(before.rstrip(_NAME_CHARACTERS))
        name, previous = text[start : match.start("close")], text[max(0, start - 1) : start]
        in_query = previous in ("?", "&")
        if not (_is_secret(name) or (in_query and name.lower().endswith(("sig", "signature", "key")))):
            continue
        if (
            ("." in name or previous == "/")
            and ":" in (match["sep"] or "")
            and _compiled(_ABOUT_A_FILE).match(lowered, match.end())
        ):
            continue  # a file called gate.token, and what is wrong with it
        closed = bool(match["close"].strip("\\]"))
        if match["pair"]:
            bracket = text[max(0, start - 6) : start].rstrip("\\\"'b")[-1:]
            if not closed or (bracket != "(" and not (bracket == "[" and _is_header(name))):
                continue
        script = text[max(0, start - 4) : max(0, start - 1)] in ("-c ", "lc ")  # sh -c "A=b command"
        outer = previous if previous in ("'", '"', "`") and not closed and not script else ""
        span = _value(text, match.end(), name, outer=outer, quoted=closed, in_query=in_query)
        spans = [span] if span else []
        if not span and (match["sep"] or "").rstrip().endswith(":"):
            spans = [*_children(text, match.end(), start, name)]
        done = spans[-1][1] if spans else done
        yield from spans


def _value(text: str, at: int, name: str, *, outer: str, quoted: bool, in_query: bool) -> Span | None:
    """The value that starts here, unless there is none or it is harmless."""
    if text.startswith(REDACTED, at):
        return None
    quote = _compiled(_QUOTE).match(text, at)
    if quote and (quote[2] != outer or text[quote.end() : quote.end() + 1].isalnum()):
        return _quoted_value(text, quote, name, outer)
    if text[at : at + 1] in ("[", "(", "{") and (end := _bracket_end(text, at)):
        mark = next((character for character in text[at:end] if character in "'\""), '"' if quoted else "")
        shown = f"{mark}{REDACTED}{mark}"
        if mark and text[at] != "{":  # a list stays a list
            shown = f"{text[at]}{shown}{text[end - 1]}"
        return None if _is_harmless(name, text[at:end]) else (at, end, shown)
    closing = _closing(text, at, outer, 0) if outer else None
    line = text.rfind("\n", max(0, at - 256), at) + 1
    if in_query:
        value = text[at : _end(_PARAMETER, text, at)]
    elif closing is not None:
        value = text[at:closing]
    elif _is_header(name) or (not quoted and _compiled(_OPENS_LINE).fullmatch(text, line, at)):
        value = text[at : _end(_LINE, text, at)].rstrip()
    else:
        value = text[at : _end(_WORD, text, at)].rstrip(",;)]}'\"`\\")
    if not value or _is_harmless(name, value) or _compiled(r"[|>][+\-0-9]{0,2}").fullmatch(value):
        return None
    return at, at + len(value), f'"{REDACTED}"' if quoted and not _is_header(name) else REDACTED


def _quoted_value(text: str, quote: re.Match[str], name: str, outer: str) -> Span | None:
    """The value behind this opening quote, up to its match or the end of the line."""
    closing = _closing(text, quote.end(), quote[2], len(quote[1]))
    if closing is not None and not quote[1]:
        after = text[closing + len(quote[2]) : closing + len(quote[2]) + 2]
        requoted = after[:1] in ("'", '"') and after[:1] != outer and after[1:].strip(" \t\r\n,;)]}")
        if after[:1].isalnum() or requoted:  # the shell's 'a'"'"'b' is one word
            return quote.start(), _end(_WORD, text, closing), REDACTED
    end = _end(_LINE, text, quote.end()) if closing is None else closing
    return None if _is_harmless(name, text[quote.end() : end]) else (quote.end(), end, REDACTED)


def _closing(text: str, at: int, mark: str, slashes: int, *, ends_word: bool = False) -> int | None:
    """Where a quote opened with so many backslashes is closed on the same line; with `ends_word` none inside a word is."""
    found = text.find(mark, at)
    while found >= 0:
        before = text[max(at, found - 16) : found]
        count = len(before) - len(before.rstrip("\\"))
        after = text[found + len(mark) : found + len(mark) + 1]
        is_inside = ends_word and (after.isalnum() or after == "_")
        if ((count <= slashes) if slashes else count % 2 == 0) and not is_inside:
            return None if "\n" in text[at:found] else found - min(count, slashes)
        found = text.find(mark, found + 1)
    return None


def _bracket_end(text: str, at: int) -> int | None:
    """Where the bracket opened here is closed, strings and inner brackets skipped."""
    if text.find({"[": "]", "(": ")", "{": "}"}[text[at]], at, at + _LONGEST_LIST) < 0:
        return None
    depth = 0
    for match in _compiled(_BRACKETS).finditer(text, at, at + _LONGEST_LIST):
        depth += (match[0] in "[({") - (match[0] in "])}")
        if depth == 0:
            return None if text[match.end() : match.end() + 1].isalnum() else match.end()
    return None


def _children(text: str, at: int, start: int, name: str) -> Iterator[Span]:
    """The lines below a YAML `name:` that hold its value: a list, a block, a value on its own line."""
    block = _compiled(r"[|>][+\-0-9]{0,2}[ \t]{0,16}(?=\r?\n)").match(text, at)
    at = block.end() if block else at
    column = start - (text.rfind("\n", max(0, start - 256), start) + 1)
    while child := _compiled(_CHILD).match(text, at):
        value, at = child["value"].rstrip(), child.start("value") + len(child["value"].rstrip())
        deeper = len(child["indent"]) > column or (child["dash"] and len(child["indent"]) == column and not block)
        if value and (not deeper or (not block and _compiled(_MAPPING).match(value))):
            return
        if value and not _is_harmless(name, value):
            yield child.start("value"), at, REDACTED


def _flag_values(text: str, plain: str) -> Iterator[Span]:
    """Values that are words of their own after a flag: in a shell line, a list, a file of arguments."""
    done = 0
    for match in _compiled(_FLAG).finditer(plain):
        if match.start() < done or not _is_secret_flag(match[0]):
            continue
        done, quote = match.end(), None
        while gap := _compiled(_NEXT_WORD).match(text, done):
            if gap["closing"] and not quote and done > match.end():  # that quote holds more than the value
                break
            begin = gap.end()
            quote = _compiled(_QUOTE).match(text, begin)
            span = _quoted_value(text, quote, match[0], "") if quote else None
            if not quote:
                value = text[begin : _end(_LINE if gap["item"] else _WORD, text, begin)].rstrip(" \t\r,;)]}'\"`\\")
                span = (begin, begin + len(value), REDACTED) if value and not _is_harmless(match[0], value) else None
            if span is None:
                break
            yield span
            done = span[1]
            if not _takes_many(match[0]):
                break


def _end(pattern: str, text: str, at: int) -> int:
    """Where the pattern, which always matches, stops."""
    match = _compiled(pattern).match(text, at)
    assert match is not None
    return match.end()


def _is_secret_flag(word: str) -> bool:
    """Whether a flag takes a secret, also when it is cut short as argparse allows."""
    if word.startswith("--") and "." in word and _is_secret_flag("--" + word.rpartition(".")[2]):  # a dotted key
        return True
    name = word.lower().replace("_", "-")
    if _compiled(r"--(?:api-ke?|hf-t(?:o|ok|oke)?)").fullmatch(name):
        return True
    return _compiled(r"--[\w.\-]+|-[a-z_\-]+").fullmatch(word) is not None and _is_secret(word)


def _takes_many(flag: str) -> bool:
    """Whether every word up to the next flag is a value, as for vLLM's `--api-key`."""
    return flag.lower().lstrip("-").startswith(("api-k", "api_k"))


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    """Whether whatever bears this name is to be hidden."""
    words = [word.lower() for word in _compiled(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+").findall(name)]
    while words and words[-1].isdigit():  # API_KEY_2
        words.pop()
    if not words or words[-1] in _HARMLESS_LAST or words[-2:] == ["allow", "credentials"]:
        return False
    if "watermark" in words and words[-1] in ("config", "key"):  # vLLM's watermark is keyed
        return True
    if any(_compiled(_HIDDEN_WORD).fullmatch(word) for word in words):
        return True
    for one, two in pairwise(words):
        if (two in ("key", "keys") and one in _KEY_OF) or (one, two) == ("amz", "signature"):
            return True
        if two in ("token", "tokens") and one in _TOKENS_OF:
            return words[-1] not in ("id", "ids")
    if words[-1] == "token":
        return _SPEECH.isdisjoint(words)
    return words[-1] in ("auth", "pwd") or (words[-1] == "pass" and words[-2:][0] in _LOGIN_OF)


def _is_header(name: str) -> bool:
    """Whether the value runs to the end of the line, whatever it is made of."""
    return name.lower().endswith(("authorization", "cookie", "x-api-key", "x-auth-token"))


def _is_harmless(name: str, value: str) -> bool:
    """Whether a value under a secret name plainly holds no secret."""
    bare = value[: 2 * _LONGEST_NAME].strip("[](){}<>\"'., ").lower()
    plain = name.strip("-").lower().replace("-", "_")
    if value.startswith(REDACTED) or not bare.strip("*"):
        return len(value) <= _LONGEST_NAME or value.startswith(REDACTED)
    if len(value) > 2 * _LONGEST_NAME:
        return False
    if bare in ("redacted", "none", "null", "nil", "true", "false", "str", "bool"):
        return True
    if bare.replace("-", "_").removeprefix("self.").removeprefix("args.") == plain:  # a help text, a traceback
        return True
    if plain == "token" and _compiled(r"\d{1,9}|<[^<>\s]{1,48}>|\[[A-Z_]{1,32}\]").fullmatch(value):
        return True
    reference = _compiled(r"[\"']?\$\{?(\w{1,64})\}?[\"']?").fullmatch(value)
    return bool(reference and _is_secret(reference[1])) or (plain == "pwd" and value.startswith(("/", "~")))


# Users' texts: prompts, messages, completions, token ids, pictures. vLLM prints them when it logs requests (`prompt: '...'`),
# at DEBUG and in some errors. What stays is what an operator needs: ids, lengths, counts, sampling parameters; a list of
# token ids leaves its length behind: `prompt_token_ids: [812 hidden]`. A text that runs over several lines is hidden up to its
# end or the next log record, line numbers stay, and when in doubt a text is hidden.

HIDDEN = "[hidden]"
MOST_LINES = 2_000  # a text that was never closed ends here
_MOST_BETWEEN = 64
_LONGEST_KEY = 64
_LONGEST_JSON = 1 << 20
_LONGEST_PREFIX = 400

_BODY_STAYS = r"<(?:empty|binary_data)>\}|streaming_(?:started|complete: no_content)[:,] chunks=\d{1,9}\}"

# The end of a name that is given a value; the whole name is read backwards from there.
_NAME = (
    r"(?P<end>prompt_text|[Pp]rompts?|[Mm]essages|conversation|[Cc]ontent|text|[Oo]utputs?|arguments|completions?|response|reasoning|thinking"
    r"|query|documents|choices|delta|system|instructions|suffix|input|input_value|stop|bad_words|token_ids|tool_calls"
    r"|function_call|_url|input_audio|multi_modal_data|mm_inputs|mm_features|mm_kwargs|spec_decode_tokens|model_output)"
    r"(?P<close>\\{0,7}[\"'])?[ \t]{0,16}(?P<sep>=(?!=)|:(?![:=]))[ \t]{0,16}"
    r"|(?P<params>GuidedDecodingParams|StructuredOutputsParams)(?=\()"
)
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
_TEXT_QUOTE = r"[bBrRuUfF]{0,2}(?P<slashes>\\{0,7})(?P<mark>\"\"\"|'''|[\"'])"
_OPEN_BRACKETS = r"\\{0,15}[\"']|[\[\](){}]"
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
            end = _closing(text, start, opened.mark, opened.slashes, ends_word=True)
            end = end if end is None else end + opened.slashes + len(opened.mark)
        elif opened.depth:
            end, self._open = _open_bracket_end(text, start, opened)
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
    if [hint for hint in _CLUES if hint in text]:  # much faster than asking the pattern
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
        end, opened = _open_bracket_end(text, at, _Open("", 0, 0, ""))
        return at, end or len(text), f"({HIDDEN})", opened
    back = text[max(0, match.start() - _LONGEST_KEY) : match.start("end")]
    before = back.rstrip(_LETTERS)
    name = (back[len(before) :] + match["end"]).lower()
    is_key = match["close"] is not None and before[-1:] in ("'", '"')
    if name == "input_value":  # what pydantic quotes of a value it refuses; the engine's own settings stay
        if text[at : at + 1] not in ("'", '"', "[", "{") or _compiled(_HIDDEN).match(text, at):
            return None
        end = text.find(", input_type=", at)
        return at, len(text) if end < 0 else end, HIDDEN, None
    if not _is_meant(name, is_key=is_key, closed=match["close"] is not None) or _compiled(_HIDDEN).match(text, at):
        return None
    quote = _compiled(_TEXT_QUOTE).match(text, at)
    if quote:
        return _quoted(text, quote)
    if text[at : at + 1] in ("[", "(", "{"):
        is_begun = is_code and not text[at + 1 :].strip()  # source that goes on below
        is_any = is_key or name in _ANY_LIST or name.endswith(("token_ids", "prompt"))
        return _listed(text, at) if is_any and not is_begun else None
    if name.endswith("token_ids") and (call := _compiled(r"[\w.]{1,40}\((?=[\[\"'])(?!\[hidden\])").match(text, at)):
        return _listed(text, call.end() - 1)
    if name.endswith("prompt") and not is_code and not _compiled(_HARMLESS).match(text, at) and text[at:].strip():
        following = _compiled(r", \w{1,40}=").search(text, at) if match["sep"] == "=" else None
        end = following.start() if following else len(text)
        return at, end, HIDDEN, None if following else _Open("", 0, 0, "")
    return None


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


def _quoted(text: str, quote: re.Match[str]) -> _Span | None:
    begin, mark, slashes = quote.end(), quote["mark"], len(quote["slashes"])
    end = _closing(text, begin, mark, slashes, ends_word=True)
    if end is None:
        return begin, len(text), f"{HIDDEN}{quote['slashes']}{mark}", _Open(mark, slashes, 0, "")
    return (begin, end, HIDDEN, None) if text[begin:end].strip() and text[begin:end] != HIDDEN else None


def _listed(text: str, at: int) -> _Span | None:
    end, opened = _open_bracket_end(text, at, _Open("", 0, 0, ""))
    if end is None:
        return at, len(text), HIDDEN, opened
    inside = text[at + 1 : end - 1]
    if not inside.strip():
        return None
    is_flat = _compiled(r"[\d,\s\-]{1,9000000}").fullmatch(inside) is not None
    return at, end, f"[{inside.count(',') + 1} hidden]" if is_flat else HIDDEN, None


def _open_bracket_end(text: str, at: int, opened: _Open) -> tuple[int | None, _Open | None]:
    """Where the bracket is closed, or what is still open at the end of the line.

    Unlike `_bracket_end`, an unclosed quote stays open: a prompt may go on, while a secret's list does not.
    """
    depth, inner, slashes = opened.depth, opened.inner, opened.slashes
    is_first = not opened.inner and not opened.depth
    for match in _compiled(_OPEN_BRACKETS).finditer(text, at):
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


def printable(text: str, instead: str = " ") -> str:
    """The text without anything that a terminal would obey, in one line: each such letter becomes `instead`."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else instead for letter in text)


def clean(text: str) -> str:
    """Without secrets, without users' text, and without what would move a terminal's cursor."""
    return printable(hide_user_text(redact(text))).strip()


def plain(value: object, cleaned: Callable[[str], str] = clean, depth: int = 40) -> object:
    """Facts as JSON has them: names and texts are cleaned of secrets on the way, and what is too deep is cut."""
    if depth == 0:
        return "…"
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None  # JSON knows neither
    if isinstance(value, Mapping):
        return {cleaned(str(name)): plain(inner, cleaned, depth - 1) for name, inner in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict(), cleaned, depth)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, cleaned, depth - 1) for inner in value]
    return cleaned(str(value))


def one_line(text: str) -> str:
    """Text of the user's on one line, without secrets and without control characters that a terminal would obey."""
    one_line = " ".join(redact(text).split()) if not text.isprintable() else redact(text)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in one_line)
