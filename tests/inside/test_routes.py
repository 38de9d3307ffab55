"""Which requests are work: every endpoint of the release in hand was thought about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.inside.answers import ASIDE, FOLLOW_UP, WORK, path_of, route_of
from plimsoll.vllm import versions
from tests.each import each

RELEASE = "0.32.0"
WORKING = """
    /v1/chat/completions /v1/chat/completions/batch /v1/chat/completions/render /v1/chat/completions/derender
    /v1/completions /v1/completions/render /v1/completions/derender
    /v1/responses /v1/responses/render /v1/messages /v1/messages/count_tokens /v1/messages/render
    /v1/embeddings /v1/score /v1/rerank /v1/systemone /v1/audio/transcriptions /v1/audio/translations
    /v2/embed /v2/rerank /cohere/v2/chat /cohere/v2/chat/render /inference/v1/generate
    /classify /generative_scoring /invocations /pooling /rerank /score /tokenize /detokenize
""".split()
STEERED = """
    /ping /pause /resume /sleep /wake_up /abort_requests /collective_rpc /release_kv_cache_memory
    /reset_prefix_cache /reset_mm_cache /reset_encoder_cache /start_profile /stop_profile
    /scale_elastic_ep /is_scaling_elastic_ep /fault_tolerance/apply /v1/load_lora_adapter /v1/unload_lora_adapter
    /init_weight_transfer_engine /shutdown_weight_transfer_engine /weight_checker
    /start_weight_update /start_draft_weight_update /update_weights /finish_weight_update /update_weight_version
""".split()
FOLLOWING = ["/v1/responses/{response_id}/cancel"]


def _rows(method: str) -> set[str]:
    stretches = versions.rows("endpoints")
    return {
        name.partition(" ")[2]
        for name, found in stretches.items()
        if name.startswith(f"{method} ") and any(versions.is_within(stretch, RELEASE) for stretch in found)
    }


def test_every_post_of_the_release_is_listed_here() -> None:
    """A new one must be thought about: work, steering or the follow-up of what was begun before."""
    assert _rows("POST") == {*WORKING, *STEERED, *FOLLOWING}
    assert not _rows("PUT") | _rows("DELETE") | _rows("PATCH")


@each("path", WORKING)
def test_work_is_counted_and_may_be_refused(path: str) -> None:
    """Everything that costs the engine or its front-end something."""
    assert route_of("http", "POST", path) == WORK


@each("path", STEERED)
def test_steering_passes_uncounted(path: str) -> None:
    """An operator needs it most while the server drains."""
    assert route_of("http", "POST", path) == ASIDE


def test_every_look_passes() -> None:
    """GET, HEAD and OPTIONS, of pages that exist and that do not; a response that was begun before is counted."""
    for path in _rows("GET") - {"/v1/responses/{response_id}"} | {"/nothing"}:
        for method in ("GET", "HEAD", "OPTIONS"):
            assert route_of("http", method, path) == ASIDE
    assert route_of("http", "GET", "/v1/responses/resp_1") == FOLLOW_UP
    assert route_of("http", "POST", "/v1/responses/resp_1/cancel") == FOLLOW_UP
    assert route_of("http", "DELETE", "/v1/responses/resp_1") == FOLLOW_UP


@given(path=st.text(max_size=30).map(lambda text: f"/{text}"), method=st.sampled_from(["POST", "PUT", "PATCH", "BREW"]))
def test_what_is_not_known_is_work(path: str, method: str) -> None:
    """A drain lets nothing pass that nobody thought about."""
    if path.rstrip("/") not in STEERED and not path.startswith("/v1/responses/"):
        assert route_of("http", method, path).is_refusable


def test_websockets_are_work() -> None:
    """Whatever their path."""
    assert _rows("WEBSOCKET") == {"/v1/realtime"}
    assert route_of("websocket", "GET", "/v1/realtime") == WORK


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/v1/models", "", "/v1/models"),
        ("/api/v1/models", "/api", "/v1/models"),
        ("/api/v1/models", "/api/", "/v1/models"),
        ("/v1/models", "/api", "/v1/models"),  # a proxy has cut it off already
        ("/api", "/api", "/"),
        ("/apiary/plimsoll", "/api", "/apiary/plimsoll"),
    ],
)
def test_the_root_path_is_cut_off_whole(path: str, root: str, expected: str) -> None:
    """A prefix ends where a name ends."""
    assert path_of(path, root) == expected
