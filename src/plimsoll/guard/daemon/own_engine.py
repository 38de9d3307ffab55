"""The server behind `plimsoll guard -- vllm serve ...`: where it will answer, and whether guard may touch it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from plimsoll.errors import BadInput
from plimsoll.launch.arguments import config_of
from plimsoll.launch.check_flags import with_config
from plimsoll.launch.command_line import CommandLine, Unseen, read_command_line
from plimsoll.launch.files import find_launch
from plimsoll.launch.launches import EntryPoint
from plimsoll.vllm.versions import engine_named

PORT = "8000"  # vLLM's own
CONNECTORS = ("--kv-transfer-config", "--ec-transfer-config")
SEVERAL = (
    "--data-parallel-address", "--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-hybrid-lb",
    "--data-parallel-external-lb",
)  # fmt: skip
"""Flags that only a server on several machines has, or one of several that are one."""
_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}  # noqa: S104  (what to ask, not where to listen)
_WHERE = "say where it answers: plimsoll guard --engine http://HOST:PORT -- COMMAND"


class OwnEngine(NamedTuple):
    """What its command line says."""

    url: str
    has_connector: bool = False
    nodes: int = 1


def own_engine(command: Sequence[str], url: str | None) -> OwnEngine:
    """The server that this command starts; `url` is what the user said of its place, if anything."""
    if not command or not command[0].strip():
        raise BadInput("nothing stands behind --; it is the command that starts the server: -- vllm serve MODEL")
    launch = find_launch(command, (), "command line")
    if launch is None:
        if url is None:
            raise BadInput(f"no vLLM start in `{' '.join(command[:3])[:100]} ...`; {_WHERE}")
        return OwnEngine(url)
    if launch.image is not None:
        raise BadInput(
            'a container is restarted through Docker, not as a process: restart = {docker = "NAME"} in an [[engine]]'
        )
    engine = engine_named(None)
    takes_model = launch.entry is not EntryPoint.API_SERVER
    line = read_command_line(launch.arguments, engine.release, takes_model=takes_model, unseen=Unseen(launch.unresolved))
    line = with_config(line, config_of(launch, ""), engine)
    if _last(line, "--headless") is not None:
        raise BadInput("a --headless server answers nobody: guard belongs to the machine that has the API server")
    nodes = _whole(_last(line, "--nnodes") or "1")
    if any(_last(line, name) is not None for name in SEVERAL):
        nodes = max(2, nodes)
    return OwnEngine(_url(line, url), any(_last(line, name) is not None for name in CONNECTORS), nodes)


def _url(line: CommandLine, url: str | None) -> str:
    """By its own words; what the user said counts where they do not tell."""
    host, port = _last(line, "--host") or "", _last(line, "--port") or PORT
    is_plain = port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65_536 and re.fullmatch(r"[\w.:*-]*", host)
    if url is not None and (_last(line, "--uds") is not None or not is_plain):
        return url
    if _last(line, "--uds") is not None:
        raise BadInput(f"a server on a Unix socket cannot be looked at; {_WHERE}")
    if not is_plain:
        raise BadInput(f"--host and --port of the command are not known; {_WHERE}")
    host = _ANY.get(host, host)
    scheme = "https" if _last(line, "--ssl-certfile") is not None else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{int(port)}"


def _last(line: CommandLine, name: str) -> str | None:
    """The last value wins, as in vLLM; a flag without one is the empty text."""
    found = [one for one in line.arguments if one.row is not None and one.row.name == name and not one.is_negated]
    return None if not found else found[-1].values[-1] if found[-1].values else ""


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 7 else 2  # not known: then better not touched
