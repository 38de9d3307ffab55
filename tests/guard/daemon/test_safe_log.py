"""Of an engine's log only what is known to be no user's text reaches the evidence, and doctor still finds what it was."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from plimsoll.doctor.read.redact_text import shown_text
from plimsoll.guard.daemon.evidence import LOG, EvidenceSources, EvidenceStore, death_in_log
from plimsoll.guard.daemon.safe_log import safe_lines
from tests.each import each

SAID = "Frau Zwiebel trinkt heimlich Absinth"
LINES = f"erste Zeile\n{SAID}\n\ndritte Zeile von Zwiebel"
WORDS = ("Zwiebel", "heimlich", "Absinth", "dritte Zeile", "玉ねぎ", "Лукова", "بصلة")
API = "(APIServer pid=7) INFO 11-15 09:00:00 [{}:56] "
CORE = "(EngineCore pid=9) ERROR 11-15 09:00:00 [{}:1512] "


def traceback(head: str, error: str) -> str:
    """As vLLM logs an exception: its head before every line."""
    rows = ["Traceback (most recent call last):", '  File "/opt/vllm/v1/engine/core.py", line 9, in run', "    self.step()"]
    return "\n".join(head + line for line in [*rows, *error.split("\n")])


SHAPES: dict[str, str] = {
    "a request's log": API.format("logger.py") + f"Received request cmpl-1: prompt: {SAID!r}, params: SamplingParams(n=1)",
    "a prompt of several lines": API.format("logger.py") + f"Received request cmpl-1: prompt: '{LINES}', params: S(n=1)",
    "each line with a head": "\n".join(API.format("logger.py") + line for line in LINES.split("\n")),
    "a print without a head": LINES,
    "a print in brackets": f"[debug] got: {SAID}",
    "an application's JSON": json.dumps({"level": "info", "event": "chat", "user": "u1", "input": SAID}),
    "JSON over several lines": json.dumps({"messages": [{"role": "user", "content": SAID}]}, indent=2),
    "JSON that wraps a vLLM line": json.dumps({"log": API.format("serving_chat.py") + SAID + "\n", "user": SAID}),
    "docker's JSON": json.dumps({"log": SAID + "\n", "stream": "stderr", "time": "2026-11-15T09:00:00Z"}),
    "structured logging of vLLM": json.dumps({"levelname": "INFO", "name": "vllm.entrypoints.serving_chat", "message": SAID}),
    "structured logging, safe file": json.dumps({"levelname": "INFO", "name": "vllm.v1.core", "message": "ok", "extra": SAID}),
    "logfmt": f'level=info ts=2026-11-15T09:00:00Z msg="chat" prompt="{SAID}"',
    "a tool's arguments": API.format("hermes_tool_parser.py") + f"call {{'arguments': {{'body': {SAID!r}}}}}",
    "a tool's arguments, broken": API.format("abstract_tool_parser.py") + f'bad JSON: {{"arguments": {{"body": "{SAID}',
    "an exception's message": traceback(CORE.format("core.py"), f"ValueError: cannot render {SAID}"),
    "an exception of several lines": traceback(CORE.format("core.py"), f"ValueError: cannot render\n{LINES}"),
    "an exception without a head": traceback("", f"KeyError: {SAID!r}"),
    "a validation error": traceback(API.format("x.py"), f"pydantic.ValidationError: 1 error\n  input_value={SAID!r}"),
    "a jinja error": traceback(API.format("chat_utils.py"), f"jinja2.exceptions.TemplateError: {SAID}"),
    "an access log": f'INFO:     10.0.0.1:5 - "GET /v1/search?q={SAID.replace(" ", "+")} HTTP/1.1" 200 OK',
    "an access log of a proxy": f'10.0.0.1 - - [15/Nov/2026:09:00:00 +0000] "GET /v1/x?q={SAID} HTTP/1.1" 200 5 "-" "curl"',
    "a response": API.format("logger.py") + f"Generated response cmpl-1: output: {SAID!r}, finish_reason: stop",
    "a grammar": CORE.format("backend_xgrammar.py") + f"Failed to compile grammar root ::= {SAID}",
    "a dump of the last step": CORE.format("dump_input.py")
    + f"Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData(req_id=a,"
    f"prompt_token_ids_len=12,mm_features=[],sampling_params=SamplingParams(stop=[{SAID!r}], max_tokens=4))])",
    "a stop word in a safe file": CORE.format("core.py") + f"request cmpl-1 has stop={[SAID]!r}",
    "a Python warning": f"/opt/app.py:3: UserWarning: odd prompt {SAID}\n  warnings.warn(text)",
    "Chinese": API.format("serving_chat.py") + "用户说 玉ねぎ 的秘密",
    "Russian, bare": "Пользователь Лукова пишет",
    "Arabic, quoted": CORE.format("core.py") + "cannot tokenize 'قالت بصلة شيئا سريا'",
    "kubectl's prefix": f"[pod/llm-0/vllm] {SAID}",
    "syslog's prefix": f"Nov 15 09:00:00 host app[7]: {SAID}",
    "a line that ends in a death": f"{SAID}\nSegmentation fault (core dumped) while answering {SAID!r}",
    "a line that begins with a share": f"50% of it: {SAID}\n100%| {SAID}\nLoading {SAID}: 50% done",
    "a line that begins as the shell's": f"Killed my python {SAID}",
    "lines that begin as the shell's": f"Killed by {SAID}\nAborted, {SAID}\nBus error {SAID}\n{SAID} core dumped",
    "lines that begin as a library's": f"terminate called {SAID}\nCUDA Error: {SAID}\nFatal Python error: {SAID}\nNVRM: {SAID}",
    "lines that begin as the server's": f"INFO:     Started {SAID}\nvllm: error: {SAID}\nThread 0xabc {SAID}\n█ {SAID}",
    "a traceback that a user pasted": 'Traceback (most recent call last):\n  File "/home/u/Zwiebel.py", line 3, in heimlich\n'
    "    trinkt(Absinth)\nValueError: x",
    "an exception that begins as a known one": f"OSError: Timed out for {SAID}\nA.Error: out of memory of {SAID}",
    "a quotation in a safe file": CORE.format("core.py") + f"got {SAID!r}",
    "HTML": f"<p>{SAID}</p>\n<script>{SAID}</script>",
    "a base64 picture with a caption": API.format("serving_chat.py") + f"data:image/png;base64,AAAA caption={SAID}",
}  # fmt: skip


@each("name", list(SHAPES))
def test_no_users_text_reaches_the_evidence(tmp_path: Path, name: str) -> None:
    """Nor the journal: whatever wrote it into the log, and in whatever language; the records around it stay."""
    log = tmp_path / "vllm.log"
    around = (
        "(APIServer pid=7) INFO 11-15 09:00:00 [launcher.py:40] Application startup complete.",
        CORE.format("core.py") + "stopped",
    )
    log.write_text(f"{around[0]}\n{SHAPES[name]}\n{around[1]}\n")
    outcome = asyncio.run(EvidenceStore(tmp_path / "kept", environ={"PATH": ""}).take("e", "a-1", EvidenceSources(str(log))))
    shown = (Path(str(outcome.facts["folder"])) / LOG).read_text()
    told = str(death_in_log(str(log)))  # all that the journal and notices have of a log
    assert not [word for word in WORDS if word in shown + told], shown + told
    assert all(line in shown for line in around), shown


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=9) ERROR 11-15 09:00:00 [a.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
        "ERROR 11-15 09:00:00 [core.py:1] FileNotFoundError: [Errno 2] No such file or directory: '/run/gate.token'",
        "(EngineCore pid=9) INFO 11-15 09:00:00 [kv_cache_utils.py:1] GPU KV cache size: 1,024 tokens",
        "(APIServer pid=7) ERROR 11-15 09:00:00 [faults.py:1] plimsoll: the engine died with 1 requests begun: prompt 8000",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        'INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
        "host-1:7:99 [0] NCCL WARN Cuda failure 700 'an-illegal-access'",
        "Segmentation fault (core dumped)",
        "Killed",
        "start.sh: line 3:    17 Segmentation fault      (core dumped) vllm serve m",
        "TimeoutError: [Errno 110] Connection timed out",
        "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:02,  1.45it/s]",
        "INFO:     Waiting for connections to close. (CTRL+C to force quit)",
        "[123.4] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
    ],
)
def test_what_says_why_it_died_is_shown(line: str) -> None:
    """Records of files that log no request, known exceptions, and the lines of the system and its drivers stay as they are."""
    assert "".join(safe_lines([line])) == line + "\n"


def test_what_was_logged_before_it_served_is_shown() -> None:
    """A process that has not finished its start has had no request: its own errors are shown whole, until it is up."""
    banner = "(APIServer pid=7) INFO 11-15 09:00:00 [api_utils.py:1]        █▄█▀ █  version 0.32.0"
    up = "(APIServer pid=7) INFO:     Application startup complete."
    error = "OSError: Zwiebel/model is not a folder"
    shown = "".join(safe_lines([banner, error, up, error]))
    assert shown.count("Zwiebel") == 1
    assert shown.endswith("OSError: [hidden]\n")
    assert "".join(shown_text(["/run/gate.token: no such file\n", "gate.token: Permission denied\n"])).count("redacted") == 0


@each("line", [" " * 100_000 + "x", "a | 0%|| 1[1]" * 700])
def test_an_odd_line_holds_nobody_up(line: str) -> None:
    """Guard's other work waits while a pattern is tried: long blanks, and a thousand bars each behind another's head."""
    begun = time.process_time()
    assert "hidden" in "".join(safe_lines([line]))
    assert time.process_time() - begun < 5


def test_the_log_is_never_on_disk_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard may be ended, or its time be up, before users' text is hidden."""

    def end(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plimsoll.guard.daemon.evidence.safe_lines", end)
    (tmp_path / "vllm.log").write_text(f"{SAID}\n")
    sources = EvidenceSources(str(tmp_path / "vllm.log"))
    outcome = asyncio.run(EvidenceStore(tmp_path / "kept", environ={"PATH": ""}).take("e", "a-1", sources))
    kept = [path.read_text() for path in Path(str(outcome.facts["folder"])).iterdir()]
    assert len(kept) == 1, "the list of contents"
    assert "No space left" in kept[0]
    assert SAID not in kept[0]
