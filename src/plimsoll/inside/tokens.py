"""Who may use the endpoints: whoever shows the token, compared in constant time. Addresses prove nothing.

Behind a proxy on the same machine every client is 127.0.0.1, and uvicorn believes X-Forwarded-For from there; so neither
an address nor a header other than the token itself is ever asked.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

OFF = "off"
DENIED = "denied"
ALLOWED = "allowed"
SHORTEST = 16


class Tokens:
    """Holds the digest of the token, never the token."""

    def __init__(self, token: str) -> None:
        self._digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest() if token else None
        self.is_short = 0 < len(token) < SHORTEST

    @property
    def is_set(self) -> bool:
        """Whether there is a token at all."""
        return self._digest is not None

    def judge(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Whether a request with these headers is allowed, denied, or the endpoints are off."""
        if self._digest is None:
            return OFF
        shown = [value for name, value in headers if bytes(name).lower() == b"authorization"]
        allowed = False
        for value in shown:
            scheme, _, token = bytes(value).partition(b" ")
            same = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
            allowed = allowed or (same and scheme.lower() == b"bearer")
        return ALLOWED if allowed and len(shown) == 1 else DENIED
