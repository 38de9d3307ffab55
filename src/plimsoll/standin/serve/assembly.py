"""Puts one server together: its routes, vLLM's own layers around them, and the middlewares that it was told to have."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.inside.answers import App
from plimsoll.inside.gate import Gate
from plimsoll.inside.settings import Settings
from plimsoll.standin.engine import Engine
from plimsoll.standin.serve.api import Api, Authentication, Front
from plimsoll.standin.serve.client_view import ClientView, one_token
from plimsoll.standin.serve.driver import Driver
from plimsoll.standin.serve.metrics import Metrics
from plimsoll.standin.serve.options import Options
from plimsoll.standin.serve.port import StartFailed
from plimsoll.standin.serve.service import Service


class Assembled(NamedTuple):
    """One server, to be put behind a port."""

    app: App
    service: Service
    client: ClientView


def assemble(
    engine: Engine,
    driver: Driver,
    options: Options,
    *,
    has_probe: bool = True,
    has_stats: bool = True,
    is_alone: bool = True,
    settings: Settings | None = None,
) -> Assembled:
    """`has_probe`: the workers tell their memory, as with the gate's extension; `settings` are the gate's.

    `is_alone`: no other server is in this process.
    """
    service = Service(engine, driver, options)
    client = ClientView(service, has_probe=has_probe)
    classes = [_named(path) for path in options.middleware]
    registry, more = _registry() if Gate in classes else (None, None)
    app: App = Authentication(Api(service, Metrics(service, more, has_stats=has_stats, is_alone=is_alone)), options.api_keys)
    # The last one named stands outermost, as in vLLM.
    for path, one in zip(options.middleware, classes, strict=True):
        app = Gate(app, settings, client.alone(registry), one_token) if one is Gate else _around(path, one, app)
    args = SimpleNamespace(max_num_queued_reqs=options.max_num_queued_reqs, max_num_queued_tokens=options.max_num_queued_tokens)
    return Assembled(Front(app, service, SimpleNamespace(engine_client=client, args=args)), service, client)


def _around(path: str, middleware: Any, app: App) -> App:
    try:
        made: App = middleware(app)
    except Exception as error:  # somebody else's code
        says = " ".join(f"{type(error).__name__}: {error}".split())
        raise StartFailed(f"--middleware {path}: {says}") from error
    return made


def _registry() -> tuple[Any, Callable[[], bytes]]:
    try:
        prometheus = importlib.import_module("prometheus_client")
    except ImportError:
        raise BadInput(
            "--middleware plimsoll.inside.Gate: prometheus-client is not installed, and vLLM would bring it"
        ) from None
    registry = prometheus.CollectorRegistry()
    return registry, lambda: bytes(prometheus.generate_latest(registry))


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(f"--middleware {path}: {error}") from None
    if not inspect.isclass(found):
        raise BadInput(f"--middleware {path}: a class that takes an ASGI app is expected")
    return found
