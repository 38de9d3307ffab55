"""Every way a secret gets into a command line, a log or a file, and every look-alike that must stay readable."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.redaction import REDACTED, _closing, printable, redact, redact_value, redact_words
from tests.each import each

CAPTURES = Path(__file__).parents[0] / "captures"

ROWS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("secrets.yaml").read_text(encoding="utf-8"))
CONTEXTS, URLS, SHAPES = ROWS["named"], ROWS["urls"], ROWS["shapes"]

letters = st.sampled_from("ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz0123456789")
secrets = st.tuples(letters, st.text("abcXYZ019+/=_.!%^*~-:@$?", min_size=8, max_size=80), letters).map("".join)
url_secrets = st.tuples(letters, st.text("abcXYZ019_.!%~-@", min_size=8, max_size=80), letters).map("".join)
fragments = st.sampled_from([
    "HF_TOKEN", "api_key", "password", "token", "Authorization", "cookie", "name", "value", "--api-key", "--hf-token",
    "-u", "a:b", "=", ": ", ":", " = ", ",", "'", '"', "\\", '\\"', "[", "]", "{", "}", "(", ")", " ", "\n", "\n  ",
    "- ", "|", "//", "@", "?", "&", "x", "hunter2", "[redacted]", "redacted", "None", "$HF_TOKEN", "\0", "`", "b'",
    "Bearer ", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "hf_abcdefghijklmnopqrst", "é", "\r\n", "5",
])  # fmt: skip


def survives(secret: str, text: str) -> bool:
    """Whether any six characters in a row of the secret can still be read."""
    return any(secret[at : at + 6] in text for at in range(len(secret) - 5))


@pytest.mark.parametrize("context", CONTEXTS)
@given(secret=secrets)
def test_a_secret_in_a_named_place_is_hidden(context: str, secret: str) -> None:
    """Whatever the secret is made of, nothing of it is left, and the text around it stands."""
    shown = redact(f"INFO before\n{context.replace('§', secret)}\nINFO after")
    assert not survives(secret, shown), shown
    assert shown.startswith("INFO before\n")
    assert shown.endswith("\nINFO after")
    assert redact(shown) == shown


@pytest.mark.parametrize("context", URLS)
@given(secret=url_secrets)
def test_credentials_in_a_url_are_hidden(context: str, secret: str) -> None:
    """User and password go; host and path stay."""
    shown = redact(context.replace("§", secret))
    assert not survives(secret, shown), shown
    assert shown.endswith(context.rpartition("@")[2])
    assert redact(shown) == shown


@each("around", ["{}", "said {} twice", '"{}"', "x={}", "line\\n{}\\nline", "\x1b[32m{}\x1b[0m", "é{}é"])
@each("shape", SHAPES)
def test_a_token_is_known_by_its_shape(shape: str, around: str) -> None:
    """A token with a known shape is hidden in any surroundings."""
    body = "a1B2c3D4e5" * 5
    token = shape
    for length in (20, 30, 34, 35, 36, 40):
        token = token.replace(f"{{{length}}}", body[:length])
    shown = redact(around.format(token))
    assert body[:8] not in shown
    assert REDACTED in shown


@each("kind", ["RSA ", "EC ", "", "OPENSSH ", "ENCRYPTED "])
@each("newline", ["\n", "\r\n", "\\n", "\n    "])
def test_a_private_key_block_is_hidden_whole(kind: str, newline: str) -> None:
    """A private key goes from its first line to its last, however its lines are separated; one cut off goes too."""
    lines = [f"-----BEGIN {kind}PRIVATE KEY-----", "DEK-Info: AES-128-CBC,1", "", "MIIEowIBAAKCAQEA+/", "c2VjcmV0=="]
    block = newline.join([*lines, f"-----END {kind}PRIVATE KEY-----"])
    assert redact(f"before\n{block}\nafter") == "before\n[redacted]\nafter"
    assert "MIIE" not in redact(f"before\n{newline.join([lines[0], *lines[3:]])}")


@each("line", ROWS["harmless"])
def test_look_alikes_stay(line: str) -> None:
    """What merely sounds like a secret is left as it is."""
    assert redact(line) == line
    assert redact(f"INFO x\n  {line}\nINFO y") == f"INFO x\n  {line}\nINFO y"


@pytest.mark.parametrize("name", ["vllm-0.32.0-cpu/metrics.txt", "vllm-0.25.1-h200/base.log", "vllm-0.25.1-h200/seedcfg.log"])
def test_what_vllm_itself_prints_stays(name: str) -> None:
    """A whole metrics page and whole logs of real engines come through unchanged."""
    text = (CAPTURES / name).read_text(encoding="utf-8")
    assert redact(text) == text


def test_json_stays_json() -> None:
    """A redacted JSON document can still be read, and everything else in it is as it was."""
    document, expected = ROWS["a document and what is shown of it"]
    assert json.loads(redact(json.dumps(document))) == expected
    assert json.loads(redact(json.dumps(document, indent=2))) == expected


@given(st.lists(fragments, max_size=40).map("".join) | st.text().map(lambda text: text + "\ud800"))
def test_twice_is_once(text: str) -> None:
    """No text raises, lone surrogates included, and redacting what is redacted changes nothing."""
    shown = redact(text)
    assert redact(shown) == shown


@given(st.lists(st.sampled_from(["the", "engine", "started", "with", "8", "GPUs", "and", "ran", "well.", "\n", "ünd", "KV"])))
def test_prose_stays(words: list[str]) -> None:
    """Plain prose comes through unchanged."""
    assert redact(" ".join(words)) == " ".join(words)


@each(("words", "shown"), ROWS["words"])
def test_a_command_line_keeps_its_words(words: str, shown: str) -> None:
    """Each word stays a word, secrets are hidden in place, and twice is once."""
    assert redact_words(shlex.split(words)) == shlex.split(shown)
    assert redact_words(shlex.split(shown)) == shlex.split(shown)


@given(st.lists(secrets, min_size=1, max_size=4), st.sampled_from(["--api-key", "--api_key"]))
def test_every_key_of_a_list_is_hidden(keys: list[str], flag: str) -> None:
    """vLLM's `--api-key` takes several keys, and none of them is shown: as words, quoted, as a list or as YAML."""
    words = ["vllm", "serve", flag, *keys, "--port", "8000"]
    yaml = "args:\n" + "".join(f"  - {json.dumps(word)}\n" for word in words)
    for shown in (" ".join(redact_words(words)), redact(shlex.join(words)), redact(str(words)), redact(yaml)):
        assert not any(survives(key, shown) for key in keys), shown
        assert "8000" in shown


@each(("name", "value", "shown"), ROWS["values"])
def test_a_value_is_judged_by_its_name(name: str, value: str, shown: str) -> None:
    """A secret name hides the whole value; any other value is still searched."""
    assert redact_value(name, value) == shown
    assert redact_value(name, shown) == shown


@given(st.text(alphabet="ab_\\\"' ", max_size=12), st.text(alphabet="ab ", max_size=6), st.sampled_from(["'", '"']))
def test_a_closing_quote_is_found_whatever_is_escaped_before_it(value: str, rest: str, mark: str) -> None:
    """Secrets and users' texts share one search: an escaped quote closes nothing, and of a text neither does one in a word."""
    inside = value.replace("\\", "\\\\").replace(mark, "\\" + mark)
    assert _closing(f"{inside}{mark} {rest}", 0, mark, 0) == len(inside)
    assert _closing(f"{inside}{mark} {rest}", 0, mark, 0, ends_word=True) == len(inside)
    assert _closing(f"{inside}{mark}s {rest}", 0, mark, 0, ends_word=True) is None


def test_what_a_terminal_would_obey_is_taken_out() -> None:
    """Colours, the cursor, line ends, the letters that turn the direction of writing; all else stays as it is."""
    assert printable("a\x1b[31mb\nc\u202ed\t") == "a [31mb c d "
    assert printable("a\x1b[31mb\n", "?") == "a?[31mb?"
    assert printable("Größe 5 €, \\n") == "Größe 5 €, \\n"


@given(st.text())
def test_any_text_is_printable_then_and_as_long_as_before(text: str) -> None:
    """Nothing is left to obey, and no letter moves."""
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
