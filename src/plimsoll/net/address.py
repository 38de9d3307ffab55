"""The parts of a server's address: the URL to call, the form that is safe to print, and the login."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from plimsoll.errors import BadInput
from plimsoll.net.inputs import HOST_AND_PORT

if TYPE_CHECKING:
    from plimsoll.net.client import Reply

URL_MAX = 8192


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address, perhaps with a path and a query."""

    url: str  # without name and password
    shown: str  # without name, password and query: safe to print
    login: str | None = None  # for the Authorization header
    socket: str = ""  # the path of a Unix socket

    def at(self, path: str, query: str = "") -> Address:
        """Returns the address of another path on the same server."""
        parts = urlsplit(self.url)
        url = urlunsplit((parts.scheme, parts.netloc, path, query, ""))
        return replace(self, url=url, shown=urlunsplit((parts.scheme, parts.netloc, path, "", "")))

    def get(self, *, most_bytes: int, timeout_s: float) -> Reply:
        """Sends a GET and waits; returns the reply. Raises where there is no answer, with the address in its printable form."""
        import asyncio  # with aiohttp it takes a quarter of a second: imported only for a call

        from plimsoll.net.client import HttpClient, Lost, same_host

        client = HttpClient(self, proxied=True)
        reply = asyncio.run(client.call("GET", deadline_s=timeout_s, most_bytes=most_bytes, follow=same_host))
        if isinstance(reply, Lost):
            raise reply.error(self.shown)
        return reply


def address(url: str) -> Address:
    """Returns the address that a user typed. Raises BadInput if it is none, in one line without any password."""
    url = url.strip()
    if not url.isascii():
        raise BadInput("the address has characters that are not ASCII")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadInput("the address cannot be read; write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not host or len(url) > URL_MAX or not url.isprintable() or " " in url:
        meant = f": http://{url}?" if re.fullmatch(HOST_AND_PORT, url) else ""
        raise BadInput(f"the address must be http://HOST:PORT or https://HOST:PORT, on one line{meant}")
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    login = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = "Basic " + base64.b64encode(pair.encode()).decode()
    clean = SplitResult(parts.scheme, netloc, parts.path, parts.query, "")
    return Address(urlunsplit(clean), urlunsplit((*clean[:3], "", "")), login)


def server_address(url: str) -> Address:
    """Returns a server's address from a configuration: http://HOST:PORT, https://HOST:PORT or unix:/PATH, without a login."""
    if url.startswith("unix:/") and url.isascii() and url.isprintable() and " " not in url:
        return Address("http://localhost", url, socket=url.removeprefix("unix:"))
    where = address(url)
    if where.login is not None:
        raise BadInput("the address holds a name or a password: give them separately")
    if urlsplit(where.url).port == 0:
        raise BadInput("the address has no port that could be one")
    return replace(where, shown=where.shown.rstrip("/"))
