"""Asks the Hugging Face hub for a model's config.json and for the headers of its weights, a few kilobytes in all.

The token goes to the hub's own host over https and nowhere else: a redirect to the storage behind the hub is followed
without it. Only the model's id, the revision and the names of the files are sent. Answers are kept, so that a second plan of
the same model needs no network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import msgspec

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.models.files import (
    CONFIG,
    CONFIG_MAX_BYTES,
    INDEX_MAX_BYTES,
    INDEXES,
    KEPT_SCHEMA,
    PICKLE_INDEX,
    PICKLES_BY_INDEX,
    QUANTIZATION,
    Index,
    ModelFiles,
    WeightFiles,
    cache_file,
    instead_of,
    kept,
    own_cache,
    parse_index,
    parse_json,
    size_note,
    with_quantization,
)
from plimsoll.models.safetensors import PREFIX_BYTES, Header, header_length, join_headers, parse_header, replace_file
from plimsoll.net.address import Address


def keep(cache: Path, files: ModelFiles, revision: str) -> ModelFiles:
    """Keeps the answer and returns it, with a note where the folder cannot be written."""
    path = cache_file(cache, files.name, revision)
    facts = {"schema": KEPT_SCHEMA} | {each.name: getattr(files, each.name) for each in fields(files)}
    try:
        replace_file(path, msgspec.json.encode(facts).decode())
    except OSError as error:
        note = f"What the hub answered could not be kept in {path.parent}: {error.strerror or error}."
        return replace(files, notes=(*files.notes, note))
    return files


_PATIENCE = 4  # a whole answer may take this many times the timeout of a single read
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Refused(Exception):  # never shown: `hub` turns it into a sentence
    """The server answered with an error."""

    def __init__(self, status: int, code: str | None) -> None:
        super().__init__(status, code)
        self.status = status
        self.code = code


class HubAnswer(NamedTuple):
    """The bytes requested, and where the server gives them the size of the whole file and its commit."""

    body: bytes
    total_bytes: int | None
    commit: str | None


def get(url: str, *, token: str | None, most_bytes: int, part: tuple[int, int] | None, timeout_s: float) -> HubAnswer:
    """The file at `url`, or its bytes from `part[0]` up to `part[1]`, within four times `timeout_s` whatever happens."""
    import asyncio  # only where something is fetched

    from plimsoll.net.client import HttpClient, Lost, bearer

    commits: list[str | None] = []

    def follow(here: str, headers: Mapping[str, str]) -> str:
        commits.append(_commit(headers))
        onward = urljoin(here, headers["Location"])
        if not onward.startswith(("https://", "http://")) or (here.startswith("https:") and onward.startswith("http:")):
            raise WorldFailed("redirects to an address that is not https")
        return onward

    sent = {} if part is None else {"Range": f"bytes={part[0]}-{part[1] - 1}"}
    if token is not None and (url.startswith("https:") or urlsplit(url).hostname in _LOOPBACK):
        sent |= bearer(token)
    client = HttpClient(Address(url, url), proxied=True, idle_s=timeout_s)
    most = most_bytes if part is None else part[1]
    reply = asyncio.run(
        client.call(
            "GET", "", b"", sent, deadline_s=_PATIENCE * timeout_s, most_bytes=most, cuts=part is not None, follow=follow
        )
    )
    if isinstance(reply, Lost):
        raise reply.error()
    if not 200 <= reply.status < 300:
        raise Refused(reply.status, reply.headers.get("X-Error-Code"))
    if reply.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise WorldFailed("answered compressed although asked not to")
    commit = next(filter(None, commits), None) or _commit(reply.headers)
    length = reply.headers.get("Content-Length", "")
    stated = int(length) if re.fullmatch(r"\d{1,18}", length) else None
    if part is None:
        return HubAnswer(reply.body, stated, commit)
    begin, end = part
    body, total = reply.body, stated or 0
    if reply.status == 206:
        span = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", reply.headers.get("Content-Range", ""))
        if span is None or int(span[1]) != begin or int(span[2]) >= end:
            raise WorldFailed("answered with another part of the file than was asked for")
        total = int(span[3])
    else:  # the server does not support ranges: it sends the whole file, and the beginning is enough
        body = body[begin:]
    if len(body) < min(end, total) - begin:
        raise WorldFailed(f"broke off after {len(body):,} of {end - begin:,} bytes")
    return HubAnswer(body, total or None, commit)


def _commit(headers: Mapping[str, str]) -> str | None:
    found = re.fullmatch(r"[0-9a-f]{7,64}", headers.get("X-Repo-Commit", ""))
    return found.group() if found else None


ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 15.0
_AT_ONCE = 8  # shards asked for side by side
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
_SINGLE_FILES = ("model.safetensors", "consolidated.safetensors")
_PICKLE = "pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub to read models from. It keeps no connection and no state but its settings."""

    endpoint: str = ENDPOINT
    token: str | None = field(default=None, repr=False, kw_only=True)
    cache: Path | None = field(default=None, kw_only=True)
    timeout_s: float = field(default=TIMEOUT_S, kw_only=True)
    is_offline: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if re.fullmatch(r"https?://[A-Za-z0-9.\-_\[\]:]+(/[^?#\s]*)?", self.endpoint.strip()) is None:
            raise BadInput("HF_ENDPOINT should be an address such as https://hub.example.com")
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]{1,512}", self.token):
            raise BadInput("the Hugging Face token holds characters that no token has; look at HF_TOKEN and the token file")

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint.strip()).netloc

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, home: Path | None = None) -> Hub:
        """The hub that Hugging Face's own tools would use, with their variables and their token."""
        env = os.environ if environment is None else environment
        home = home or Path(env.get("HOME") or Path.home())
        offline = any(env.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        return cls(env.get("HF_ENDPOINT") or ENDPOINT, token=_token(env, home), cache=own_cache(env, home), is_offline=offline)

    def read(self, name: str, revision: str | None = None) -> ModelFiles:
        """The model of that id; BadInput where there is none or it is gated, WorldFailed where the hub does not answer."""
        revision = revision or "main"
        if self.cache is not None and (known := kept(self.cache, name, revision)) is not None:
            return known
        if self.is_offline:
            why = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so the hub is not asked"
            raise WorldFailed(f"{name}: {why}; {instead_of(name)}")
        files = self._fetch(name, revision)
        return files if self.cache is None else keep(self.cache, files, revision)

    def _fetch(self, name: str, revision: str) -> ModelFiles:
        answer = self._get(name, revision, CONFIG, CONFIG_MAX_BYTES)
        if answer is None:
            raise BadInput(
                f"{name}: has no config.json on {self.host}, so it is not a model that can be planned; {instead_of(name)}"
            )
        config = dict(parse_json(answer.body, CONFIG_MAX_BYTES, f"{name}: {CONFIG}"))
        commit = answer.commit or revision

        def quantization() -> Mapping[str, object] | None:
            said = self._get(name, commit, QUANTIZATION, INDEX_MAX_BYTES)
            return parse_json(said.body, INDEX_MAX_BYTES, f"{name}: {QUANTIZATION}") if said else None

        config = with_quantization(config, quantization)
        weights = self._weights(name, commit)
        notes = (weights.note,) if weights.note else ()
        return ModelFiles(name, config, weights.tensors, weights.total_bytes, f"{self.host} snapshot {commit[:12]}", notes)

    def _weights(self, name: str, commit: str) -> WeightFiles:
        for file in INDEXES:
            if answer := self._get(name, commit, file, INDEX_MAX_BYTES):
                where = f"{name}: {file}"
                return self._shards(name, commit, parse_index(parse_json(answer.body, INDEX_MAX_BYTES, where), where))
        for file in _SINGLE_FILES:
            if (header := self._header(name, commit, file)) is not None:
                return WeightFiles(header.tensors, header.data_bytes)
        if answer := self._get(name, commit, PICKLE_INDEX, INDEX_MAX_BYTES):
            where = f"{name}: {PICKLE_INDEX}"
            total = parse_index(parse_json(answer.body, INDEX_MAX_BYTES, where), where).total_bytes
            return WeightFiles(None, total, PICKLES_BY_INDEX)
        if (size := self._get(name, commit, _PICKLE, 1, (0, 1))) is not None:
            return WeightFiles(None, size.total_bytes, "The weights are one pickle, which is never opened: its size was taken.")
        return WeightFiles(
            None, None, "The repository has no weights under the usual names; their size is worked out from config.json."
        )

    def _shards(self, name: str, commit: str, index: Index) -> WeightFiles:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                headers = list(pool.map(lambda shard: self._header(name, commit, shard), index.shards))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # one broken shard is enough; do not ask for the rest
                raise
        absent = [shard for shard, header in zip(index.shards, headers, strict=True) if header is None]
        if absent or not headers:
            note = f"{len(absent)} of {len(index.shards)} shards are not on the hub, so the size is the one in the index."
            return WeightFiles(None, index.total_bytes, note)
        pairs = zip(index.shards, headers, strict=True)
        header = join_headers((f"{name}: {shard}", found) for shard, found in pairs if found is not None)
        return WeightFiles(header.tensors, header.data_bytes, size_note(index.total_bytes, header.data_bytes))

    def _header(self, name: str, commit: str, file: str) -> Header | None:
        """The header of one safetensors file, by two range requests; None where there is no such file."""
        where = f"{name}: {file}"
        first = self._get(name, commit, file, PREFIX_BYTES, (0, PREFIX_BYTES))
        if first is None:
            return None
        if first.total_bytes is None:
            raise WorldFailed(f"{where}: {self.host} does not say how large the file is")
        length = header_length(first.body, first.total_bytes, where)
        rest = self._get(name, commit, file, length, (PREFIX_BYTES, PREFIX_BYTES + length))
        if rest is None or rest.total_bytes != first.total_bytes or len(rest.body) != length:
            raise WorldFailed(f"{where}: {self.host} gave two different answers for the same file; try again")
        return parse_header(rest.body, first.total_bytes - PREFIX_BYTES - length, where)

    def _get(self, name: str, revision: str, file: str, most: int, part: tuple[int, int] | None = None) -> HubAnswer | None:
        """One file or a part of it; None where the repository does not have it.

        A gated or private model is the user's input (exit 2), not the world's failure: the hub answered, and only a token or
        an accepted licence changes the answer, not another try.
        """
        url = f"{self.endpoint.strip().rstrip('/')}/{quote(name)}/resolve/{quote(revision, safe='')}/{quote(file)}"
        here = f"{name}: {self.host}"
        try:
            return get(url, token=self.token, most_bytes=most, part=part, timeout_s=self.timeout_s)
        except Refused as refused:
            status, code = refused.status, refused.code
        except TooLarge as error:
            raise TooLarge(f"{name}: {file}: {error}") from None
        except (TimedOut, WorldFailed) as error:
            raise type(error)(f"{here} {error}; {instead_of(name)}") from None
        if status in (401, 403):
            have = "HF_TOKEN was refused or has no access" if self.token else "no HF_TOKEN is set"
            why = f"{name}: {'gated' if code == 'GatedRepo' else 'gated, private or not there'} on {self.host}, and {have}"
            raise BadInput(f"{why}; accept its licence there and set HF_TOKEN, {instead_of(name)}")
        if status == 404 and code == "RevisionNotFound":
            raise BadInput(f"{here} has no revision {ascii(revision)[:80]} of it")
        if status == 404 and (file != CONFIG or code == "EntryNotFound"):
            return None
        if status == 404:
            raise BadInput(f"{name}: not on {self.host}; {instead_of(name)}")
        said = "asks us to slow down (429)" if status == 429 else f"answered {status}"
        raise WorldFailed(f"{here} {said}; try again later, or {instead_of(name)}")


def _token(environment: Mapping[str, str], home: Path) -> str | None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := environment.get(name, "").strip():
            return token
    hugging_face = Path(environment.get("HF_HOME") or home / ".cache" / "huggingface")
    path = Path(environment.get("HF_TOKEN_PATH") or hugging_face / "token")
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(1024).strip() or None
    except (OSError, ValueError):
        return None
