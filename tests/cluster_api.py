"""Plays a Kubernetes API server over a real socket: lists, watches, versions, conflicts, evictions, rights, tokens, slowness.

What is played is what guard asks for. Nothing here was seen to differ from a real cluster, and nothing of it was met in one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from aiohttp import web

from tests.each import sure

TOKEN = "the-token-of-guards-own-account"
Json = dict[str, Any]
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[a-z0-9.]+)/v1)(?:/namespaces/(?P<namespace>[^/]+))?/(?P<resource>[a-z]+)"
    r"(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?"
)


@dataclass(frozen=True, slots=True, order=True)
class Call:
    verb: str
    group: str
    resource: str
    namespace: str = ""
    name: str = ""


@dataclass(slots=True)
class Trouble:
    """Answers one call otherwise: with a status, late, or not at all ("lost": it is done, and the server hangs up).

    Without a verb it is whichever call of the resource comes next.
    """

    verb: str
    resource: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: Json = field(default_factory=dict)
    wait_s: float = 0.0
    is_lost: bool = False


def status_of(code: int, message: str = "", **more: Any) -> Json:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, **more}


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ClusterApi:
    """Objects by group/resource, namespace and name. `may` is RBAC; `evicts` is asked before a pod is evicted."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[tuple[str, str], Json]] = {}
        self.version = 100
        self.tokens = {TOKEN}
        self.calls: list[Call] = []
        self.refused: list[Call] = []
        self.evicted: list[str] = []  # pods, each time that it was granted
        self.troubles: list[Trouble] = []
        self.may: Callable[[Call], bool] = lambda _: True
        self.evicts: Callable[[Json], tuple[int, Json, dict[str, str]] | None] = lambda _: None
        self.reviews: dict[str, Json] = {}  # by token: the user of a TokenReview
        self.may_user: Callable[[str, Json], bool] = lambda _user, _what: False  # of a SubjectAccessReview
        self.asked: list[Json] = []  # whom SubjectAccessReviews were about
        self.pieces = 0  # letters of an answer that are sent at once; 0: all
        self.page = 500  # objects of a list, whatever is asked for
        self._log: list[tuple[int, str, str, Json, Json | None]] = []  # version, event, resource, the object, and as it was
        self._changed = asyncio.Condition()
        self._forgotten = 0
        self._watches: set[asyncio.Task[Any]] = set()
        self._uids = 0
        self.url = ""

    # Objects

    def kind(self, resource: str) -> dict[tuple[str, str], Json]:
        return self.objects.setdefault(resource, {})

    def put(self, resource: str, item: Json, event: str = "") -> Json:
        """Keeps an object as it is given, with the next version, and tells those who watch."""
        about = item["metadata"]
        key = (about.get("namespace", ""), about["name"])
        self.version += 1
        if "uid" not in about:
            self._uids += 1
            about |= {"uid": f"uid-{self._uids}", "creationTimestamp": stamp()}
        about["resourceVersion"] = str(self.version)
        before = self.kind(resource).get(key)
        self._tell(event or ("ADDED" if before is None else "MODIFIED"), resource, item, before)
        self.kind(resource)[key] = item
        return item

    def drop(self, resource: str, namespace: str, name: str) -> None:
        item = self.kind(resource).pop((namespace, name), None)
        if item is not None:
            self.version += 1
            item["metadata"]["resourceVersion"] = str(self.version)
            self._tell("DELETED", resource, item)

    def _tell(self, event: str, resource: str, item: Json, before: Json | None = None) -> None:
        self._log.append((self.version, event, resource, *json.loads(json.dumps([item, before]))))
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def forget(self) -> None:
        """What was before this moment is not told any more: a watch from there gets 410 Gone."""
        self.version += 1
        self._forgotten = self.version
        self.cut_watches()

    def cut_watches(self) -> None:
        for task in self._watches:
            task.cancel()

    # The server

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        app = web.Application(client_max_size=4 << 20)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.cut_watches()
            await runner.cleanup()

    def call_of(self, request: web.Request) -> Call | None:
        found = _PATH.fullmatch(request.path)
        if found is None:
            return None
        name, sub = found["name"] or "", found["sub"]
        verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        reads = "get" if name else "watch" if request.query.get("watch") else "list"
        resource = found["resource"] + (f"/{sub}" if sub else "")
        return Call(verbs.get(request.method, reads), found["group"] or "", resource, found["namespace"] or "", name)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        call = self.call_of(request)
        if request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            return web.json_response(status_of(401, "Unauthorized"), status=401)
        if call is None:
            return web.json_response(status_of(404, "no such path"), status=404)
        self.calls.append(call)
        if not self.may(call):
            self.refused.append(call)
            return web.json_response(status_of(403, f"cannot {call.verb} {call.resource}"), status=403)
        body = await request.json() if request.can_read_body else {}  # now: who asked may be gone before it is done
        meets = (one for one in self.troubles if one.verb in ("", call.verb) and one.resource == call.resource)
        trouble = next(meets, None)
        if trouble is not None:
            self.troubles.remove(trouble)
            await asyncio.sleep(trouble.wait_s)
            if trouble.status:
                says = trouble.body or status_of(trouble.status)
                return web.json_response(says, status=trouble.status, headers=trouble.headers)
        if call.verb == "watch":
            return await self._watch(request, call)
        status, reply, headers = self._do(call, body, request)
        if trouble is not None and trouble.is_lost:
            assert request.transport is not None
            request.transport.abort()
        return await self._send(request, status, reply, headers)

    async def _send(self, request: web.Request, status: int, body: Json, headers: dict[str, str]) -> web.StreamResponse:
        data = json.dumps(body).encode()
        if not self.pieces:
            return web.Response(status=status, body=data, headers=headers, content_type="application/json")
        response = web.StreamResponse(status=status, headers={**headers, "Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for place in range(0, len(data), self.pieces):
            await response.write(data[place : place + self.pieces])
            await asyncio.sleep(0)
        return response

    def _do(self, call: Call, body: Json, request: web.Request) -> tuple[int, Json, dict[str, str]]:
        plural, key = f"{call.group}/{call.resource}", (call.namespace, call.name)
        if call.resource == "tokenreviews":
            user = self.reviews.get(body["spec"]["token"])
            return 201, {"status": {"authenticated": user is not None, "user": user or {}}}, {}
        if call.resource == "subjectaccessreviews":
            asked = body["spec"]
            self.asked.append({name: value for name, value in asked.items() if name != "resourceAttributes"})
            return 201, {"status": {"allowed": self.may_user(asked["user"], asked["resourceAttributes"])}}, {}
        if call.resource == "pods/eviction":
            return self._evict(key, body)
        if call.verb == "list":
            return 200, self._page(plural, call.namespace, request), {}
        spec = body.get("spec", {})
        counts = spec.get("leaseDurationSeconds", 1), spec.get("leaseTransitions", 0) + 1
        if call.resource == "leases" and (min(counts) < 1 or spec.get("holderIdentity") == ""):
            return 422, status_of(422, "Lease is invalid"), {}
        if call.verb == "create":
            key = (call.namespace, body["metadata"].get("name") or f"{body['metadata']['generateName']}{self.version}")
            if key in self.kind(plural):
                return 409, status_of(409, "AlreadyExists"), {}
            body["metadata"] |= {"namespace": key[0], "name": key[1]}
            return 201, self.put(plural, body), {}
        found = self.kind(plural).get(key)
        if found is None:
            return 404, status_of(404, "not found"), {}

        def is_meant(name: str) -> bool:
            return bool(body["metadata"].get(name, found["metadata"][name]) == found["metadata"][name])

        if call.verb == "update":
            if not is_meant("resourceVersion"):
                return 409, status_of(409, "the object has been modified"), {}
            return 200, self.put(plural, body), {}
        if call.verb == "patch":
            if not is_meant("uid"):
                return 409, status_of(409, "the UID in the precondition does not match"), {}
            return 200, self.put(plural, merged(json.loads(json.dumps(found)), body)), {}
        return 200, found, {}

    def _page(self, plural: str, namespace: str, request: web.Request) -> Json:
        wanted = selects(request.query.get("labelSelector", ""))
        items = [item for key, item in sorted(self.kind(plural).items()) if key[0] == namespace and wanted(item)]
        begin, size = int(request.query.get("continue", "0")), min(self.page, int(request.query.get("limit", "500")))
        more = {"continue": str(begin + size)} if begin + size < len(items) else {}
        about = {"resourceVersion": str(self.version), **more}
        return {"kind": "List", "metadata": about, "items": items[begin : begin + size]}

    def _evict(self, key: tuple[str, str], body: Json) -> tuple[int, Json, dict[str, str]]:
        pod = self.kind("/pods").get(key)
        if pod is None:
            return 404, status_of(404, "not found"), {}
        if (body.get("apiVersion"), body.get("kind")) != ("policy/v1", "Eviction"):
            return 400, status_of(400, "that is no Eviction"), {}
        uid = body.get("deleteOptions", {}).get("preconditions", {}).get("uid")
        if uid != pod["metadata"]["uid"]:
            return 409, status_of(409, "the UID in the precondition does not match"), {}
        if (no := self.evicts(pod)) is not None:
            return no
        self.evicted.append(key[1])
        if "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = stamp()
            self.put("/pods", pod)
        return 201, {"kind": "Status", "status": "Success"}, {}

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        since, wanted = int(request.query["resourceVersion"]), selects(request.query.get("labelSelector", ""))
        plural = f"{call.group}/{call.resource}"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if since < self._forgotten:
            error = {"type": "ERROR", "object": status_of(410, "too old resource version")}
            await response.write(json.dumps(error).encode() + b"\n")
            return response
        task = sure(asyncio.current_task())
        self._watches.add(task)
        try:
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "60"))):
                while True:
                    news = [row for row in self._log if row[0] > since and row[2] == plural]
                    for version, event, _, item, before in news:
                        since = version
                        was, is_ = before is not None and wanted(before), wanted(item)
                        if item["metadata"].get("namespace", "") == call.namespace and (was or is_):
                            # For those who watch by labels it may have come or gone.
                            kind = event if was == is_ or event != "MODIFIED" else "ADDED" if is_ else "DELETED"
                            data = json.dumps({"type": kind, "object": item}).encode() + b"\n"
                            step = self.pieces or len(data)
                            for place in range(0, len(data), step):
                                await response.write(data[place : place + step])
                    async with self._changed:
                        await self._changed.wait()
        except TimeoutError:
            bookmark = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(since)}}}
            with contextlib.suppress(ConnectionError):
                await response.write(json.dumps(bookmark).encode() + b"\n")
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass  # who watched is gone
        finally:
            self._watches.discard(task)
        return response


def merged(item: Json, patch: Json) -> Json:
    for name, value in patch.items():
        if value is None:
            item.pop(name, None)
        elif isinstance(value, dict) and isinstance(item.get(name), dict):
            merged(item[name], value)
        else:
            item[name] = value
    return item


def selects(selector: str) -> Callable[[Json], bool]:
    pairs = [part.split("=", 1) for part in selector.split(",") if part]
    return lambda item: all(item["metadata"].get("labels", {}).get(name) == value for name, value in pairs)


def deployment(name: str, replicas: int, *, namespace: str = "llm", **status: int) -> Json:
    """A Deployment whose pods are all of its newest version, unless `status` says otherwise."""
    counts = {"replicas": replicas, "readyReplicas": replicas, "updatedReplicas": replicas, "observedGeneration": 1, **status}
    return {
        "kind": "Deployment", "metadata": {"name": name, "namespace": namespace, "uid": f"uid-of-{name}", "generation": 1},
        "spec": {"replicas": replicas}, "status": counts,
    }  # fmt: skip


def owned_by(kind: str, name: str, uid: str) -> list[Json]:
    return [{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": uid, "controller": True}]


def pod(
    name: str,
    *,
    namespace: str = "llm",
    address: str = "10.0.0.9",
    is_ready: bool = True,
    owner: tuple[str, str, str] | None = ("ReplicaSet", "vllm-5f7", "uid-of-vllm-5f7"),
    labels: dict[str, str] | None = None,
    spec: Json | None = None,
    status: Json | None = None,
    **meta: Any,
) -> Json:
    ready = {"type": "Ready", "status": str(is_ready)}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": namespace, "labels": {"app": "vllm", **(labels or {})},
            "ownerReferences": owned_by(*owner) if owner else [], **meta,
        },
        "spec": {"nodeName": "node-1", "containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": 8000}]}],
                 **(spec or {})},
        "status": {"phase": "Running", "podIP": address, "conditions": [ready], **(status or {})},
    }  # fmt: skip
