"""Writes the walks of docs/architecture.md: the files that a serve line, a log, a trace and a request pass through.

python -m lab.write_walks            # rewrite the page; with --check only say whether it is out of date
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import plimsoll
from lab.marked import placed
from plimsoll.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = Path(plimsoll.__file__).parent
BEGIN, END = "<!-- walks: made by python -m lab.write_walks -->", "<!-- end of walks -->"
_IS_FUNCTION = 0x2  # the flag of code that is neither a module's nor a class's

LOG = "tests/captures/vllm-0.25.1-h200-failures/logits.log"
TRACE = "tests/captures/outputs/inputs/azure.csv"


def _run(*words: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        main.main(list(words))


async def _request() -> None:
    """One streamed answer through the gate."""
    from plimsoll.inside.gate import Gate

    async def app(_scope: object, _receive: object, send: Callable[[dict[str, object]], object]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": b"data: [DONE]"})  # type: ignore[misc]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}"}

    async def send(_message: object) -> None:
        return None

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await Gate(app)(scope, receive, send)


WALKS: dict[str, Callable[[], object]] = {
    "A serve line to the ledger (`plimsoll plan --gpu H100 -- vllm serve meta-llama/Llama-3.1-8B-Instruct`)": lambda: _run(
        "plan", "--gpu", "H100", "--", "vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"
    ),
    f"A log to a finding (`plimsoll doctor {LOG}`)": lambda: _run("doctor", str(ROOT / LOG)),
    "A trace row to a report (`plimsoll simulate TRACE`)": lambda: _run("simulate", str(ROOT / TRACE)),
    "A request through the gate": lambda: asyncio.run(_request()),
}
# From a metrics page to HAProxy, by hand: processes, sockets and minutes lie between the first file and the last.
GUARD = "A metrics page to an action at HAProxy (`plimsoll guard --config plimsoll.toml --act`)"
GUARD_FILES = (
    "guard/daemon/run.py guard/daemon/observer.py guard/daemon/engine_look.py"
    " guard/daemon/engine_figures.py guard/judge/look.py guard/judge/judge.py guard/judge/history.py guard/judge/load.py"
    " guard/judge/tracker.py guard/daemon/acting.py guard/act/decide.py guard/act/capacity.py guard/daemon/conductor.py"
    " guard/act/steps.py guard/daemon/journal.py guard/daemon/steps.py guard/adapters/haproxy.py"
).split()


def files_of(walk: Callable[[], object]) -> list[str]:
    """The files of ours whose functions a walk calls, in the order of their first call."""
    found: dict[str, None] = {}
    prefix = f"{PACKAGE}{os.sep}"

    def look(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and code.co_flags & _IS_FUNCTION:
            found.setdefault(code.co_filename.removeprefix(prefix))

    walk()  # once before, so that what is done once a process does not count
    sys.setprofile(look)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return list(found)


def walks() -> dict[str, list[str]]:
    """The files of every walk, in order."""
    return {**{title: files_of(walk) for title, walk in WALKS.items()}, GUARD: list(GUARD_FILES)}


def _lines() -> Iterator[str]:
    for title, files in walks().items():
        yield f"### {title}\n"
        yield from (f"{number}. `{file}`: {_sentence(PACKAGE / file)}" for number, file in enumerate(files, 1))
        yield ""


def _sentence(path: Path) -> str:
    text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].replace("\n", " ")
    is_name = text[1:2].isupper() or text.startswith("Guard")
    return "the command" if text.startswith("usage:") else (text if is_name else text[:1].lower() + text[1:]).rstrip(".")


def section() -> str:
    """The walks as they are now."""
    return "\n".join(_lines())


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    page = placed(text, BEGIN, END, f"\n\n{section()}", PAGE)
    if "--check" in sys.argv and page != text:
        sys.exit("docs/architecture.md is out of date: python -m lab.write_walks")
    PAGE.write_text(page, encoding="utf-8")
