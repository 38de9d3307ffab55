"""The endpoints that steer an engine, which vLLM has in its development mode alone."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from plimsoll.standin.engine import SLEEP_STATES
from plimsoll.standin.serve import fields
from plimsoll.standin.serve.fields import Field, JsonAnswer, dead, plain
from plimsoll.standin.serve.service import Service

MODES = ("abort", "wait", "keep")
PARTS = {"weights", "kv_cache"}  # an engine is awake when all of it is
LOOK_S = 0.01  # how often a pause that waits looks whether all is done
SETTLE_S = 0.02  # vLLM waits so long, too, for what was aborted to be answered

Query = dict[str, list[str]]
Handler = Callable[[Service, Query, bytes], Awaitable[JsonAnswer]]


def query_of(raw: bytes) -> Query:
    """A query string as names and their values."""
    return parse_qs(raw.decode("latin-1"), keep_blank_values=True)


def _number(query: Query, name: str, default: int, least: int, most: int) -> int:
    return int(_value(query, name, Field("int", least=least, most=most))) if name in query else default


def _switch(query: Query, name: str, *, default: bool) -> bool:
    return bool(_value(query, name, Field("bool"))) if name in query else default


def _value(query: Query, name: str, field: Field) -> Any:
    value, wrong = fields.value_of(field, query[name][-1], ("query", name))
    if wrong:
        raise fields.refusal(wrong)
    return value


def _word(query: Query, name: str, words: tuple[str, ...]) -> str:
    word = query.get(name, [words[0]])[-1]
    if word not in words:
        expected = f"{', '.join(repr(one) for one in words[:-1])} or {words[-1]!r}"
        wrong = fields.problem("literal_error", ("query", name), f"Input should be {expected}", word, expected=expected)
        raise fields.refusal([wrong])
    return word


async def _pause(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del body
    mode, clears = _word(query, "mode", MODES), _switch(query, "clear_cache", default=True)
    await _quiet(service, mode, lambda: service.engine.pause(mode, service.driver.now_ns()))
    if clears and mode != "keep":
        service.engine.reset_prefix_cache(reset_running=False)
    return JsonAnswer(200, {"status": "paused"})


async def _quiet(service: Service, mode: str, act: Callable[[], None]) -> None:
    """Do it, and with what is in flight what the mode says; back when that is done."""
    if service.engine.is_dead:
        raise dead()
    there = [choice.request for choice in service.states.values() if choice.request is not None]
    act()
    service.driver.plan()
    while mode == "wait" and any(request.finish is None for request in there):
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(SETTLE_S)


async def _resume(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del query, body
    service.engine.resume(service.driver.now_ns())
    service.driver.plan()
    return JsonAnswer(200, {"status": "resumed"})


async def _is_paused(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del query, body
    return JsonAnswer(200, {"is_paused": service.engine.is_paused})


async def _sleep(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del body
    level, mode = _number(query, "level", 1, 0, 2), _word(query, "mode", MODES)
    await _quiet(service, mode, lambda: _fall_asleep(service, level, mode))
    service.tell_sleep(is_asleep=True, level=level)
    return JsonAnswer(200, {"status": "sleeping", "level": level})


def _fall_asleep(service: Service, level: int, mode: str) -> None:
    """Without --enable-sleep-mode vLLM's allocator has nothing to put away: it says that it sleeps, and keeps its memory.

    Only torch's free segments go back to the device.
    """
    engine, now_ns = service.engine, service.driver.now_ns()
    if service.options.has_sleep_mode or level == 0:
        return engine.sleep(level, mode, now_ns)
    engine.sleep(0, mode, now_ns)
    engine.figures.sleep_state = SLEEP_STATES[level]
    engine.memory.compact()
    return None


async def _wake_up(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del body
    tags = query.get("tags")
    service.woken |= set(tags or PARTS)
    is_awake = service.engine.figures.sleep_state == SLEEP_STATES[0] or service.woken >= PARTS
    if is_awake:
        service.woken.clear()
        service.engine.wake_up(service.driver.now_ns())
        service.driver.plan()
        service.tell_sleep(is_asleep=False, level=0)
    return JsonAnswer(200, {"status": "awake" if is_awake else "sleeping", "tags": tags})


async def _is_sleeping(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del query, body
    engine = service.engine
    return JsonAnswer(200, {"is_sleeping": engine.sleep_level is not None or engine.is_paused})


async def _reset_prefix_cache(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del body
    resets = _switch(query, "reset_running_requests", default=False)
    _switch(query, "reset_external", default=False)
    is_done = service.engine.reset_prefix_cache(reset_running=resets)
    service.driver.plan()
    return JsonAnswer(200, {"success": bool(is_done)})


async def _nothing(service: Service, query: Query, body: bytes) -> JsonAnswer:
    """A cache that a stand-in does not have is empty already."""
    del service, query, body
    return JsonAnswer(200, None)


async def _abort_requests(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del query
    names = _object(body, "Invalid JSON format").get("request_ids")
    if names:
        if not (isinstance(names, str) or (isinstance(names, list) and all(isinstance(name, str | int) for name in names))):
            raise plain(400, "'request_ids' must be a list of strings")
        # vLLM counts the names that it was given, known or not, and of a single one the letters.
        wanted = {names} if isinstance(names, str) else set(names)
        chosen = [one for one in service.states.values() if wanted & {one.name, one.name.rpartition("-")[0]}]
        count = len(names)
    else:
        chosen = list(service.states.values())
        count = len(chosen)
    service.abort(chosen)
    return JsonAnswer(200, {"status": "aborted", "aborted": count})


async def _collective_rpc(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del query
    method = _object(body, None).get("method")
    if method is None:
        raise plain(400, "Missing 'method' in request body")
    if method == "plimsoll_figures":
        workers = service.engine.worker_figures(service.driver.now_ns())
        # Whoever reads the figures knows how old they are; whoever writes them does not.
        return JsonAnswer(200, {"results": [{k: v for k, v in one.items() if k not in ("age_s", "alive")} for one in workers]})
    if method == "plimsoll_compact":
        return JsonAnswer(200, {"results": service.engine.compact(service.driver.now_ns())})
    raise plain(501, f"a stand-in has no workers that could run {str(method)[:80]}")


def _object(body: bytes, complaint: str | None) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise plain(400, complaint or f"JSON decode error: {error}") from None
    if not isinstance(found, dict):
        raise plain(400, "Request body must be a JSON object")
    return found


async def _server_info(service: Service, query: Query, body: bytes) -> JsonAnswer:
    del body
    config = service.engine.config
    known = {
        "model": config.model,
        "max_model_len": config.max_model_len,
        "scheduler": config.settings._asdict(),
        "cache": dict(config.cache_labels),
    }
    wants_json = _word(query, "config_format", ("text", "json")) == "json"
    said: object = json.loads(json.dumps(known, default=str)) if wants_json else str(known)
    environment = {"python_version": platform.python_version(), "os": platform.platform()}
    return JsonAnswer(200, {"vllm_config": said, "vllm_env": {"VLLM_SERVER_DEV_MODE": True}, "system_env": environment})


ROUTES: dict[str, tuple[str, Handler]] = {
    "/pause": ("POST", _pause),
    "/resume": ("POST", _resume),
    "/is_paused": ("GET", _is_paused),
    "/sleep": ("POST", _sleep),
    "/wake_up": ("POST", _wake_up),
    "/is_sleeping": ("GET", _is_sleeping),
    "/reset_prefix_cache": ("POST", _reset_prefix_cache),
    "/reset_mm_cache": ("POST", _nothing),
    "/reset_encoder_cache": ("POST", _nothing),
    "/abort_requests": ("POST", _abort_requests),
    "/collective_rpc": ("POST", _collective_rpc),
    "/server_info": ("GET", _server_info),
}
