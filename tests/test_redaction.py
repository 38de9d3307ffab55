"""Every way a secret gets into a command line, a log or a file, and every look-alike that must stay readable."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.redaction import REDACTED, _closing, printable, redact, redact_value, redact_words
from tests.each import each

CAPTURES = Path(__file__).parents[0] / "captures"

# Each holds one secret at §.
CONTEXTS = (
    # environment
    *(f"{name}=§" for name in (
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "DB_PASSWORD", "X_PASSWD", "APP_SECRET", "MY_CREDENTIALS",
        "PGPASSWORD", "MYSQL_PWD", "NGROK_AUTHTOKEN", "API_KEY_2", "SMTP_PASS", "REDISCLI_AUTH", "MYCORP_TOKEN",
    )),
    "export HF_TOKEN=§ ; vllm serve m",
    "HF_TOKEN='§' vllm serve m",
    'Environment="HF_TOKEN=§ and more"',
    'docker run -e "VLLM_API_KEY=§" --env HF_TOKEN=x image',
    '"Env": ["PATH=/bin", "HF_TOKEN=§"]',
    "ENV HF_TOKEN §",
    'os.environ["HF_TOKEN"] = "§"',
    "(('HF_TOKEN', '§'), ('A', 'b'))",
    # YAML, JSON, TOML, ini
    "api-key: §",
    "  password: § and more words",
    "api-key:\n  - §\n  - other\nport: 8000",
    "api_key: [§, b]",
    "password: |\n  §\nport: 1",
    "env:\n- name: HF_TOKEN\n  value: §\n- name: A\n  value: b",
    '{"name": "HF_TOKEN", "value": "§"}',
    '{"api_key": "§", "port": 1}',
    '{"api_key": [\n  "a",\n  "§"\n]}',
    '{"client_secret":"§"}',
    '{"accessToken": "§", "refresh_token": "§", "private_key": "§"}',
    '"{\\"api_key\\": \\"§\\", \\"port\\": 1}"',
    "password = §",
    'hf_token = "§" # why',
    # vLLM's own lines
    "INFO 11-15 01:15:22 [api_utils.py:273] non-default args: {'port': 8123, 'api_key': ['§', 'b'], 'model': 'm'}",
    "Dumping input data for V1 LLM engine (v0.11.0) with config: model='m', hf_token=§, seed=0",
    "Namespace(api_key=['§'], hf_token='§', port=8000)",
    # command lines as text
    "vllm serve m --api-key § --port 8000",
    "vllm serve m --api-key a § c --port 8000",
    "vllm serve m --api-key=§ --port 8000",
    "vllm serve m --hf-token § --ssl-keyfile-password §",
    "vllm serve m \\\n  --api_key § \\\n  --port 8000",
    'command: ["--api-key", "§", "--port", "8000"]',
    "args:\n  - --api-key\n  - §\n  - --port\n",
    "serve\0--api-key\0§\0--port\x008000",
    "curl -u me:§ http://host",
    # headers
    "Authorization: Bearer §",
    "authorization: Basic §",
    "Authorization: §",
    "Proxy-Authorization: Digest a=1, b=§",
    "X-API-Key: §",
    "Cookie: a=b; session=§",
    "Set-Cookie: session=§; Path=/",
    'curl -H "Authorization: Bearer §" http://host/v1/models',
    "curl -H 'X-API-Key: §' http://host/v1/models",
    '{"Authorization": "Bearer §", "Accept": "*/*"}',
    "{'authorization': 'Bearer §', 'accept': '*/*'}",
    "[(b'host', b'h'), (b'authorization', b'Bearer §')]",
    # URLs
    "https://host/path?token=§&a=b",
    "https://host/path?a=b&api_key=§",
    "https://host/path?sv=1&sig=§&se=2",
    "https://host/o?X-Amz-Credential=§&X-Amz-Signature=§",
    "https://host/v1?key=§",
)  # fmt: skip
URLS = (
    "https://user:§@host/path", "https://§@host/path", "git clone https://oauth2:§@gitlab.com/a/b.git",
    "redis://:§@host:6379/0", "postgres://me:§@db/x", "s3://AKIA:§@bucket/key", "//§@host", "http_proxy=http://u:§@h:1",
)  # fmt: skip
SHAPES = (
    "hf_{34}", "sk-{40}", "sk-proj-{40}", "sk-ant-api03-{40}", "ghp_{36}", "gho_{36}", "ghs_{36}", "github_pat_{40}",
    "glpat-{20}", "xoxb-{30}", "xoxp-{30}", "AIza{35}", "nvapi-{40}", "eyJ{30}.eyJ{30}.{40}", "gsk_{40}",
)  # fmt: skip

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


HARMLESS = (
    "--max-num-batched-tokens 8192", "max_tokens=16", "generation_tokens_total", "tokenizer='m'",
    "--tokenizer-mode auto", "GPU KV cache size: 327,680 tokens", "key_cache: 3", "num_kv_heads=8", "cache_key=abc",
    "public_key: abc", "bos_token_id: 0", 'eos_token="</s>"', "pad_token: '<pad>'", '"special_tokens": ["<s>"]',
    "token_ids=[1, 2]", 'vllm:prompt_tokens_total{engine="0",model_name="m"} 12', "sha256:" + "0123456789abcdef" * 4,
    "0f9e8d7c" * 5, "Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: 5.0 tokens/s", "token: 128009",
    "token='<|im_end|>'", "long_prefill_token_threshold=0", "time_per_output_token: 3ms", "image_token='<image>'",
    "KeyError: 'x'", "key: value", "hf_token=None, seed=0", "'VLLM_API_KEY': None", "api_key=***", "HF_TOKEN=",
    'HF_TOKEN="$HF_TOKEN"', "--api-key ${VLLM_API_KEY} --port 1", "token=self.token, x=1", "allow_credentials=False",
    "--allow-credentials model", "HF_TOKEN is not set", "secretName: tls", "secretKeyRef:\n  name: hf\n  key: token",
    "token_file: /run/token", "PWD=/root", "--ssl-keyfile /etc/key.pem", "'pass_config': {'fuse': True}",
    "inductor_passes={}", "http://127.0.0.1:8000/v1", "git@github.com:a/b.git", "ssh://git@host/a",
    "https://github.com/a/b@v1", "image@sha256:abc", "me@example.com", "http://host:8000/path/@scope/x", "-u 1000:1000",
    "--user 1000:1000", "Token::Kind", "HTTP bearer authorization for files",
    "usage: [--api-key API_KEY [API_KEY ...]] [--hf-token [HF_TOKEN]]", "signal=9", "author: me",
    "task-" + "abcdefgh" * 4, "hf_config=LlamaConfig", "['HF_TOKEN', 'WANDB_API_KEY']", "watermark=0.01",
    "the key 'sig' of x", "hf_overrides={}",
)  # fmt: skip


@each("line", HARMLESS)
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
    document = {
        "api_key": ["a", 'b"]'],
        "password": 1234,
        "token": None,
        "x": {"client_secret": "s\\"},
        "secrets": {"a": 1},
    }
    expected = {
        "api_key": [REDACTED],
        "password": REDACTED,
        "token": None,
        "x": {"client_secret": REDACTED},
        "secrets": REDACTED,
    }
    assert json.loads(redact(json.dumps(document))) == expected
    assert json.loads(redact(json.dumps(document, indent=2))) == expected


@given(st.lists(fragments, max_size=40).map("".join))
def test_twice_is_once(text: str) -> None:
    """Redacting what is redacted changes nothing."""
    shown = redact(text)
    assert redact(shown) == shown


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    """No text raises, lone surrogates included, and the second time changes nothing."""
    assert redact(redact(text + "\ud800")) == redact(text + "\ud800")


@given(st.lists(st.sampled_from(["the", "engine", "started", "with", "8", "GPUs", "and", "ran", "well.", "\n", "ünd", "KV"])))
def test_prose_stays(words: list[str]) -> None:
    """Plain prose comes through unchanged."""
    assert redact(" ".join(words)) == " ".join(words)


@each(("words", "shown"), [
    ("vllm serve m --api-key a b c --port 1", "vllm serve m --api-key [redacted] [redacted] [redacted] --port 1"),
    ("vllm serve --hf-token a m", "vllm serve --hf-token [redacted] m"),
    ("vllm serve m --api-key=a --ssl-keyfile-password=b",
     "vllm serve m --api-key=[redacted] --ssl-keyfile-password=[redacted]"),
    ("vllm serve m --api_key a --api-k b --hf-tok c",
     "vllm serve m --api_key [redacted] --api-k [redacted] --hf-tok [redacted]"),
    ("docker run -e HF_TOKEN='a b' -eX_SECRET=a -e HF_TOKEN -u 0:0 i",
     "docker run -e HF_TOKEN=[redacted] -eX_SECRET=[redacted] -e HF_TOKEN -u 0:0 i"),
    ("docker run --env A_TOKEN=b --env=B_TOKEN=c i", "docker run --env A_TOKEN=[redacted] --env=B_TOKEN=[redacted] i"),
    ("env HF_TOKEN=a vllm serve m", "env HF_TOKEN=[redacted] vllm serve m"),
    ("sh -c 'HF_TOKEN=a vllm serve m --api-key b'", "sh -c 'HF_TOKEN=[redacted] vllm serve m --api-key [redacted]'"),
    ("curl -H 'Authorization: Bearer a b' -u me:you http://u:p@h",
     "curl -H 'Authorization: [redacted]' -u [redacted] http://[redacted]@h"),
    ("vllm serve m --watermark-config.key 7", "vllm serve m --watermark-config.key [redacted]"),
    ("vllm serve m --max-num-batched-tokens 8k", "vllm serve m --max-num-batched-tokens 8k"),
    ("vllm serve m --api-key $VLLM_API_KEY", "vllm serve m --api-key $VLLM_API_KEY"),
])  # fmt: skip
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


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("HF_TOKEN", "a b", REDACTED),
    ("HF_TOKEN", "", ""),
    ("HF_TOKEN", "None", "None"),
    ("AWS_ACCESS_KEY_ID", "minio", REDACTED),
    ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
    ("HTTPS_PROXY", "http://u:p@proxy:3128", "http://[redacted]@proxy:3128"),
    ("VLLM_ARGS", "--api-key a --port 1", "--api-key [redacted] --port 1"),
    ("max_tokens", "16", "16"),
])  # fmt: skip
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
