"""The questions: each has a name, and says which values of its answer are no fact of the server (a drawn text, an id)."""

from __future__ import annotations

from typing import Any, NamedTuple

from lab.conformance.client import Ask

MODEL = "tiny"
IDS = list(range(560, 600))  # forty token ids of the vocabulary, none of them special
API_KEY = "an-api-key-for-the-lab"
TOKEN = "an-honest-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
COUNTED_BY_TOKENIZER = ("prompt_tokens", "total_tokens")  # of a text, how many tokens it has is the tokenizer's affair


class Case(NamedTuple):
    """One question; `free`: keys whose values may differ here and not elsewhere."""

    name: str
    ask: Ask
    free: tuple[str, ...] = ()


def completion(name: str, *, prompt: Any = IDS, free: tuple[str, ...] = (), **fields: Any) -> Case:
    """A completion; by default of token ids, past any end-of-sequence, and of four tokens; a stream's of more, so that a
    server that puts several into one chunk still sends several chunks."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 40 if fields.get("stream") is True else 4,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    body = {key: value for key, value in body.items() if value is not None}
    return Case(f"completions: {name}", Ask("POST", "/v1/completions", body), free)


def chat(name: str, *, free: tuple[str, ...] = COUNTED_BY_TOKENIZER, **fields: Any) -> Case:
    """A chat completion of one message."""
    messages = [{"role": "user", "content": "may the ship be loaded"}]
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 40 if fields.get("stream") is True else 4,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    body = {key: value for key, value in body.items() if value is not None}
    return Case(f"chat: {name}", Ask("POST", "/v1/chat/completions", body), free)


def get(path: str, **more: Any) -> Case:
    """A GET."""
    return Case(f"GET {path}", Ask("GET", path), **more)


def post(path: str, body: Any = None, name: str = "", **more: Any) -> Case:
    """A POST, with a JSON body if there is one."""
    return Case(f"POST {path}{': ' if name else ''}{name}", Ask("POST", path, body), **more)


def with_method(method: str, path: str) -> Case:
    """Any method, without a body."""
    return Case(f"{method} {path}", Ask(method, path))


def raw(path: str, name: str, data: bytes, content_type: str = "application/json") -> Case:
    """A POST of these bytes."""
    return Case(f"POST {path}: {name}", Ask("POST", path, raw=data, headers={"Content-Type": content_type}))


USAGE = {"include_usage": True}

COMPLETIONS = (
    completion("token ids"),
    completion("token ids, stream", stream=True),
    completion("token ids, stream with usage", stream=True, stream_options=USAGE),
    completion("token ids, usage in every chunk", stream=True, stream_options={**USAGE, "continuous_usage_stats": True}),
    completion("text", prompt="may the ship be loaded", free=COUNTED_BY_TOKENIZER),
    completion("text, stream", prompt="may the ship be loaded", stream=True),
    completion("two texts", prompt=["may the ship", "be loaded"], free=COUNTED_BY_TOKENIZER),
    completion("two lists of ids", prompt=[IDS, IDS[:7]]),
    completion("two lists of ids, stream with usage", prompt=[IDS, IDS[:7]], stream=True, stream_options=USAGE),
    completion("n=2", n=2, temperature=1),
    completion("n=2, stream with usage", n=2, temperature=1, stream=True, stream_options=USAGE),
    completion("n=2, greedy", n=2),
    completion("n=0", n=0),
    completion("max_tokens=0", max_tokens=0),
    completion("max_tokens=1", max_tokens=1),
    completion("max_tokens=-1", max_tokens=-1),
    completion("huge max_tokens", max_tokens=1_000_000),
    completion("max_tokens left out", max_tokens=None),
    completion("max_tokens as text", max_tokens="four"),
    completion("max_tokens as a number in a text", max_tokens="4"),
    completion("as long as the context", prompt=[7] * 2000, max_tokens=48),
    completion("one token past the context", prompt=[7] * 2000, max_tokens=49),
    completion("prompt as long as the context", prompt=[7] * 2048, max_tokens=1),
    completion("prompt too long", prompt=[7] * 2049, max_tokens=1),
    completion("prompt too long, stream", prompt=[7] * 3000, max_tokens=1, stream=True),
    completion("unknown model", model="other"),
    completion("unknown model, stream", model="other", stream=True),
    completion("no model", model=None),
    completion("empty prompt", prompt=""),
    completion("empty list", prompt=[]),
    completion("no prompt", prompt=None),
    completion("prompt of a number", prompt=5),
    completion("prompt of an object", prompt={"a": 1}),
    completion("token id outside the vocabulary", prompt=[1_000_000]),
    completion("negative token id", prompt=[-1]),
    completion("negative temperature", temperature=-1),
    completion("temperature as text", temperature="warm"),
    completion("top_p=0", top_p=0),
    completion("top_p=2", top_p=2),
    completion("top_k=-5", top_k=-5),
    completion("frequency_penalty=9", frequency_penalty=9),
    completion("best_of", best_of=2, n=1),
    completion("unknown field", nonsense=1),
    completion("user", user="someone"),
    completion("stream_options without stream", stream_options=USAGE),
    completion("stream as text", stream="perhaps"),
    completion("seed", seed=7, temperature=1),
    completion("min_tokens", min_tokens=3),
    completion("min_tokens above max_tokens", min_tokens=9),
    completion("negative min_tokens", min_tokens=-1),
    completion("priority without priority scheduling", priority=5),
    Case("completions: request id", Ask("POST", "/v1/completions", {"model": MODEL, "prompt": IDS, "max_tokens": 1},
         headers={"X-Request-Id": "mine-7"})),
    raw("/v1/completions", "malformed JSON", b'{"model": "tiny", "prompt"'),
    raw("/v1/completions", "a list", b"[1, 2]"),
    raw("/v1/completions", "no body", b""),
    raw("/v1/completions", "null", b"null"),
    raw("/v1/completions", "not UTF-8", b'{"model": "\xff"}'),
    raw("/v1/completions", "as text/plain", b'{"model": "tiny", "prompt": [7], "max_tokens": 1}', "text/plain"),
    raw("/v1/completions", "no content type", b'{"model": "tiny", "prompt": [7], "max_tokens": 1}', ""),
)  # fmt: skip

CHATS = (
    chat("plain"),
    chat("stream", stream=True),
    chat("stream with usage", stream=True, stream_options=USAGE),
    chat("usage in every chunk", stream=True, stream_options={**USAGE, "continuous_usage_stats": True}),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=3),
    chat("max_tokens=1", max_tokens=1),
    chat("max_tokens=1, stream", max_tokens=1, stream=True),
    chat("max_tokens=0", max_tokens=0),
    chat("huge max_tokens", max_tokens=1_000_000),
    chat("n=2", n=2, temperature=1),
    chat("n=2, stream", n=2, temperature=1, stream=True),
    chat("seed", seed=7, temperature=1),
    chat("unknown model", model="other"),
    chat("no model", model=None),
    chat("no messages", messages=None),
    chat("empty messages", messages=[]),
    chat("messages as text", messages="hello"),
    chat("message without content", messages=[{"role": "user"}]),
    chat("unknown role", messages=[{"role": "nobody", "content": "hello"}]),
    chat("content in parts", messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]),
    chat("three messages", messages=[{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"},
         {"role": "assistant", "content": "hi"}]),
    chat("prompt too long", messages=[{"role": "user", "content": "the ship " * 4000}], free=("message",)),
    chat("stream_options without stream", stream_options=USAGE),
    chat("negative temperature", temperature=-1),
    raw("/v1/chat/completions", "malformed JSON", b"{"),
)  # fmt: skip

SERVER = (
    get("/v1/models", free=("root",)),
    get("/v1/models/tiny"),
    get("/health"),
    get("/ping"),
    post("/ping"),
    get("/version"),
    get("/"),
    get("/nowhere"),
    get("/v1/nowhere"),
    get("/health/"),
    get("/v1/completions"),
    get("/docs", free=("page",)),
    post("/health"),
    post("/v1/models"),
    with_method("HEAD", "/health"),
    with_method("HEAD", "/v1/models"),
    with_method("HEAD", "/v1/completions"),
    with_method("OPTIONS", "/v1/completions"),
    with_method("OPTIONS", "/health"),
    with_method("PUT", "/v1/completions"),
    with_method("DELETE", "/v1/models"),
    Case("OPTIONS /v1/completions: preflight", Ask("OPTIONS", "/v1/completions",
         headers={"Origin": "http://example.org", "Access-Control-Request-Method": "POST"})),
    Case("GET /health: with an origin", Ask("GET", "/health", headers={"Origin": "http://example.org"})),
)  # fmt: skip

# In this order: each leaves the server as the next expects it, and the last of them leaves it serving.
DEVELOPMENT = (
    get("/is_paused"),
    get("/is_sleeping"),
    post("/pause?mode=keep"),
    get("/is_paused"),
    get("/is_sleeping"),
    get("/health"),
    post("/pause?mode=keep", name="again"),
    post("/resume"),
    post("/resume", name="again"),
    post("/pause?mode=wait"),
    post("/resume"),
    post("/pause?mode=abort"),
    post("/resume"),
    post("/pause"),
    post("/resume"),
    post("/pause?mode=wait&clear_cache=false"),
    post("/resume"),
    post("/pause?mode=nonsense"),
    get("/pause"),
    post("/reset_prefix_cache"),
    post("/reset_prefix_cache?reset_running_requests=true"),
    post("/reset_prefix_cache?reset_running_requests=perhaps"),
    post("/sleep?level=0"),
    get("/is_sleeping"),
    get("/is_paused"),
    post("/wake_up"),
    post("/wake_up?tags=scheduling"),
    get("/is_sleeping"),
    post("/sleep?level=1"),
    get("/is_sleeping"),
    post("/wake_up?tags=weights"),
    get("/is_sleeping"),
    post("/wake_up", name="from level 1"),
    post("/sleep?level=7"),
    post("/sleep?level=0&mode=wait"),
    post("/wake_up?tags=nonsense"),
    post("/wake_up"),
)

REQUESTS = (*SERVER, *COMPLETIONS, *CHATS, *DEVELOPMENT)

KEY = {"Authorization": f"Bearer {API_KEY}"}
# A server with an API key, and without development mode.
KEYED = (
    Case("GET /v1/models: no key", Ask("GET", "/v1/models")),
    Case("GET /v1/models: key", Ask("GET", "/v1/models", headers=KEY), ("root",)),
    Case("GET /v1/models: wrong key", Ask("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})),
    Case("GET /v1/models: another scheme", Ask("GET", "/v1/models", headers={"Authorization": f"Basic {API_KEY}"})),
    Case("GET /v1/nowhere: no key", Ask("GET", "/v1/nowhere")),
    Case("POST /v1/completions: no key", Ask("POST", "/v1/completions", {"model": MODEL, "prompt": IDS})),
    Case("POST /v1/completions: key", Ask("POST", "/v1/completions",
         {"model": MODEL, "prompt": IDS, "max_tokens": 2, "ignore_eos": True}, headers=KEY)),
    Case("OPTIONS /v1/completions: no key", Ask("OPTIONS", "/v1/completions")),
    get("/health"),
    get("/version"),
    post("/pause"),
    get("/is_paused"),
    get("/is_sleeping"),
    post("/reset_prefix_cache"),
)  # fmt: skip


def long_answer(tokens: int, *, stream: bool, first_id: int, headers: dict[str, str] | None = None, **more: Any) -> Ask:
    """A completion that takes a while; `first_id` makes its prompt its own."""
    prompt = [first_id, *range(300, 316)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream}
    return Ask("POST", "/v1/completions", body | more, headers=headers or {})
