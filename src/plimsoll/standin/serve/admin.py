"""The endpoints that control an engine, which vLLM has only in its development mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from plimsoll.standin.engine import SLEEP_STATES
from plimsoll.standin.serve.protocol import Json, checked, dead
from plimsoll.standin.serve.service import Service

PARTS = {"weights", "kv_cache"}  # an engine is awake when both are
LOOK_S = 0.01  # how often a waiting pause looks whether all requests have ended
SETTLE_S = 0.02  # for aborted requests to be answered; vLLM waits as long


M = TypeVar("M", bound=BaseModel)


class PauseQuery(BaseModel):
    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class SleepQuery(BaseModel):
    level: Annotated[int, Field(ge=0, le=2)] = 1
    mode: Literal["abort", "wait", "keep"] = "abort"


class ResetQuery(BaseModel):
    reset_running_requests: bool = False


def _query(request: Request, model: type[M]) -> M:
    return checked(model.model_validate, dict(request.query_params), "query")


async def pause(service: Service, request: Request) -> Response:
    query = _query(request, PauseQuery)
    await _quiet(service, query.mode, lambda: service.engine.pause(query.mode, service.driver.now_ns()))
    if query.clear_cache and query.mode != "keep":
        service.engine.reset_prefix_cache(reset_running=False)
    return Json({"status": "paused"})


async def _quiet(service: Service, mode: str, act: Callable[[], None]) -> None:
    """Runs `act`, and in the mode `wait` waits until the requests in flight have ended."""
    if service.engine.is_dead:
        raise dead()
    there = [choice.request for choice in service.states.values() if choice.request is not None]
    act()
    service.driver.plan()
    while mode == "wait" and any(request.finish is None for request in there):
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(SETTLE_S)


async def resume(service: Service, _request: Request) -> Response:
    service.engine.resume(service.driver.now_ns())
    service.driver.plan()
    return Json({"status": "resumed"})


async def is_paused(service: Service, _request: Request) -> Response:
    return Json({"is_paused": service.engine.is_paused})


async def sleep(service: Service, request: Request) -> Response:
    """Answers POST /sleep. Without --enable-sleep-mode vLLM only says that it sleeps, and keeps its memory.

    Then only torch's free segments go back to the device.
    """
    query = _query(request, SleepQuery)

    def fall_asleep() -> None:
        engine, has_mode = service.engine, service.options.has_sleep_mode
        engine.sleep(query.level if has_mode else 0, query.mode, service.driver.now_ns())
        if query.level and not has_mode:
            engine.figures.sleep_state = SLEEP_STATES[query.level]
            engine.memory.compact()

    await _quiet(service, query.mode, fall_asleep)
    service.on_sleep(query.level)
    return Json({"status": "sleeping", "level": query.level})


async def wake_up(service: Service, request: Request) -> Response:
    tags = request.query_params.getlist("tags") or None
    service.woken |= set(tags or PARTS)
    is_awake = service.engine.figures.sleep_state == SLEEP_STATES[0] or service.woken >= PARTS
    if is_awake:
        service.woken.clear()
        service.engine.wake_up(service.driver.now_ns())
        service.driver.plan()
        service.on_sleep(None)
    return Json({"status": "awake" if is_awake else "sleeping", "tags": tags})


async def is_sleeping(service: Service, _request: Request) -> Response:
    return Json({"is_sleeping": service.engine.sleep_level is not None or service.engine.is_paused})


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    query = _query(request, ResetQuery)
    is_done = service.engine.reset_prefix_cache(reset_running=query.reset_running_requests)
    service.driver.plan()
    return Json({"success": bool(is_done)})


ROUTES = {
    **{f"/{endpoint.__name__}": ("GET", endpoint) for endpoint in (is_paused, is_sleeping)},
    **{f"/{endpoint.__name__}": ("POST", endpoint) for endpoint in (pause, resume, sleep, wake_up, reset_prefix_cache)},
}
