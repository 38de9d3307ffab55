"""Let the real vLLM fail in every way we can bring about, and keep its logs: python -m lab.engine.record_failures OUT [NAMES]

Each case (see failure_cases) is one server. Its log goes to OUT/<name>.log (or .log.gz), and what was done, with which
exit code, to OUT/labels.json. Everything in a log is the engine's own, except the paths of the machine, our own questions
to /health, and the frame of the plugin that raised the error. Two servers at a time; all of them take about an hour.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab.engine.failure_actions import Run
from lab.engine.failure_cases import CASES
from lab.engine.failure_models import BROKEN, broken_model, lora_adapter
from lab.engine.failure_parts import Case
from lab.engine.install import engine_home, model_home
from lab.engine.server import EngineServer

PLUGIN_HOME = Path(__file__).resolve().parent / "oom_anywhere"
SETTING = "PLIMSOLL_LAB_FAIL"
AT_A_TIME = 2
PLAIN_LIMIT_BYTES = 30_000  # above it, a file is kept compressed
KEPT_LIMIT_BYTES = 60_000  # above it, the middle of a log is left out
SAME_REQUEST_LINES = 8
LEFT_OUT = "[... {} lines left out ...]"

PREFIX = re.compile(r"^(?:\([^)]{1,60}\) )?(?:[A-Z]{4,8} [^\]]{1,80}\] )?")
FRAME = re.compile(r'^ *File "(?P<file>[^"]*)"')
OUR_QUESTION = re.compile(r'"(?:GET /health|GET /metrics) HTTP')
CLIENT = re.compile(r"(?P<host>\d+\.\d+\.\d+\.\d+):\d+ - \"")
ADDRESS_SPACE_BYTES = 4 << 30
MEMORY_BYTES = 3 << 30
CGROUPS = Path("/sys/fs/cgroup/memory")

JSON_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "json": {
            "format": '{"time": "%(asctime)s", "level": "%(levelname)s", "logger": "%(name)s", "line": %(lineno)d, "pid": '
            '%(process)d, "message": "%(message)s"}'
        }
    },
    "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stdout"}},
    "loggers": {"vllm": {"handlers": ["out"], "level": "INFO", "propagate": False}},
}


# What is kept


def trim(text: str, places: Mapping[str, str]) -> str:
    """The log without what belongs to this machine and to us: `places` says what each path or name becomes."""
    lines = without_our_frames(elsewhere(text, places).split("\n"))
    lines = [line for line in lines if not OUR_QUESTION.search(line)]
    return "\n".join(within_size(few_of_each_request(lines)))


def elsewhere(text: str, places: Mapping[str, str]) -> str:
    """The text as another machine would have printed it; the longest place goes first, as it may hold another."""
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, places[place])
    return text


def without_our_frames(lines: list[str]) -> list[str]:
    """The tracebacks as they would be had torch itself raised: without the frames of the plugin."""
    kept, skipping = [], False
    for line in lines:
        frame = FRAME.match(PREFIX.sub("", line))
        if frame:
            skipping = "oom_anywhere" in frame["file"]
        elif skipping:
            skipping = _is_source_line(line)
        if not skipping:
            kept.append(line)
    return kept


def _is_source_line(line: str) -> bool:
    """Whether this is the code, or the marks below it, that a traceback prints under a frame."""
    return PREFIX.sub("", line).startswith("    ")


def few_of_each_request(lines: list[str]) -> list[str]:
    """The access log with the first few lines of each kind alone."""
    seen: dict[str, int] = {}
    kept = []
    for line in lines:
        if CLIENT.search(line):
            kind = CLIENT.sub("", line)
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] > SAME_REQUEST_LINES:
                continue
        kept.append(line)
    return kept


def within_size(lines: list[str], limit: int = KEPT_LIMIT_BYTES) -> list[str]:
    """The first third and the last two thirds of what the limit allows, when all is too much."""
    sizes = [len(line.encode()) + 1 for line in lines]
    if sum(sizes) <= limit:
        return lines
    head, used = 0, 0
    while used + sizes[head] <= limit // 3:
        used += sizes[head]
        head += 1
    tail = len(lines)
    while tail > head and used + sizes[tail - 1] <= limit:
        tail -= 1
        used += sizes[tail]
    return [*lines[:head], LEFT_OUT.format(tail - head), *lines[tail:]]


def last_oom_kill(kernel: str) -> str:
    """What the kernel wrote about the last process it killed for memory, or nothing."""
    lines = kernel.splitlines()
    ends = [at for at, line in enumerate(lines) if "out of memory: Killed process" in line]
    if not ends:
        return ""
    starts = [at for at, line in enumerate(lines[: ends[-1]]) if "invoked oom-killer" in line]
    return "\n".join(lines[starts[-1] if starts else 0 : ends[-1] + 1]) + "\n"


def write_kept(path: Path, text: str) -> str:
    """Write the text, compressed when it is long, and give the name of the file."""
    data = text.encode()
    compressed = path.with_name(path.name + ".gz")
    path.unlink(missing_ok=True)
    compressed.unlink(missing_ok=True)
    if len(data) > PLAIN_LIMIT_BYTES:
        compressed.write_bytes(gzip.compress(data, mtime=0))
        return compressed.name
    path.write_bytes(data)
    return path.name


# One case


@contextlib.contextmanager
def wrapped(case: Case, server: EngineServer, scratch: Path) -> Iterator[None]:
    """Put the server under the limits, or among the things, that the case asks for."""
    with contextlib.ExitStack() as stack:
        if case.under == "taken port":
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", server.port))
            taken.listen()
        elif case.under == "no privilege":
            # Root without these two rights is refused by a closed folder as anybody is.
            server.command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *server.command]
        elif case.under == "limit of address space":
            server.command = ["prlimit", f"--as={ADDRESS_SPACE_BYTES}", *server.command]
        elif case.under == "limit of memory":
            group = stack.enter_context(memory_group())
            server.command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *server.command]
        elif case.under == "full disk":
            disk = stack.enter_context(small_disk(scratch / "cache"))
            server.env |= {"VLLM_CACHE_ROOT": str(disk), "TORCHINDUCTOR_CACHE_DIR": str(disk / "inductor")}
        elif case.under == "JSON log":
            (scratch / "logging.json").write_text(json.dumps(JSON_LOG))
            server.env["VLLM_LOGGING_CONFIG_PATH"] = str(scratch / "logging.json")
        yield


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """A control group with a memory limit, gone afterwards with all that still runs in it."""
    group = CGROUPS / "vllm"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    try:
        yield group
    finally:
        group.rmdir()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system that is full after a few kilobytes."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def plain_command(command: list[str]) -> list[str]:
    """The command without those of the lab's own flags that the case gives again or takes back."""
    plain = list(command)
    if plain.count("--max-model-len") > 1:
        at = plain.index("--max-model-len")
        del plain[at : at + 2]
    if "--no-enforce-eager" in plain:
        plain = [word for word in plain if not word.endswith("enforce-eager")]
    if plain.count("--load-format") > 1:
        at = plain.index("--load-format")
        del plain[at : at + 2]
    return plain


def fault_environment(case: Case, flag: Path) -> dict[str, str]:
    """The environment that loads the plugin with the fault of this case."""
    if case.fault is None:
        return {}
    fault: dict[str, Any] = case.fault._asdict()
    if case.act.__name__ != "fail_to_start":
        fault["flag"] = str(flag)
    return {"VLLM_PLUGINS": "oom_anywhere", "PYTHONPATH": str(PLUGIN_HOME), SETTING: json.dumps(fault)}


def record(case: Case, out: Path) -> dict[str, Any]:
    """Run one case to its end, write its files, and give its label."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-case-") as name:
        scratch = Path(name)
        flag = scratch / "due"
        model = str(broken_model(case.model, scratch)) if case.model in (*BROKEN, "tiny") else case.model
        flags = case.flags.replace("{adapter}", str(lora_adapter(scratch))).split()
        server = EngineServer(flags, {**case.env, **fault_environment(case, flag)}, dev_mode=False)
        server.command = plain_command([*server.command[:2], model, *server.command[3:]])
        server.env = {name: value for name, value in server.env.items() if case.env.get(name) != ""}
        asked = list(server.command)
        pages: dict[str, str] = {}
        with wrapped(case, server, scratch):
            try:
                server.start()
                case.act(Run(server, flag, pages.__setitem__))
                code, text = server.exit_code(), server.log_text()  # before we stop what still runs
            finally:
                server.stop()
        places = {**machine_places(), str(scratch / case.model): f"/models/{case.model}", str(scratch): "/scratch"}
        places[server.env["TMPDIR"]] = "/tmp/vllm"
        if case.under == "limit of memory":
            (out / f"{case.name}.dmesg.txt").write_text(elsewhere(last_oom_kill(dmesg()), places))
        if raw := os.environ.get("PLIMSOLL_LAB_RAW"):
            (Path(raw) / f"{case.name}.log").write_text(text)
        kept = write_kept(out / f"{case.name}.log", trim(text, places))
        extra = [path.name for path in out.glob(f"{case.name}.dmesg.txt")]
        extra += [write_kept(out / f"{case.name}.metrics-{when}.txt", elsewhere(page, places)) for when, page in pages.items()]
        if case.model in BROKEN:
            Path(model).chmod(0o755)  # or it could not be removed
    command = elsewhere(" ".join(asked), places).replace(f"--port {server.port} ", "")
    return label(case, command, code, [kept, *extra])


def label(case: Case, command: str, exit_code: int | None, files: list[str]) -> dict[str, Any]:
    """What a test needs to know of the recording."""
    done = (case.act.__doc__ or "").strip()
    made: dict[str, Any] = {"name": case.name, "files": files, "command": command, "environment": case.env}
    if case.fault is not None:
        made["raised"] = {"in": case.fault.at, "under": case.fault.within, "text": case.fault.text}
    made |= {"done": " ".join(filter(None, (done, case.why, case.under and f"Under: {case.under}."))), "expect": case.expect}
    return made | {"memory_failure": case.memory, "exit_code": exit_code}


def dmesg() -> str:
    """The kernel's ring buffer."""
    return subprocess.run(["dmesg"], capture_output=True, text=True, check=True).stdout


def machine_places() -> dict[str, str]:
    """What stands for this machine in a log, and what stands there instead."""
    home = engine_home()
    packages = next((home / "lib").glob("python3*/site-packages"))
    places = {str(packages): "/opt/vllm/site-packages", str(home): "/opt/vllm", str(model_home()): "/models/tiny"}
    places[platform.release()] = "6.8.0"
    places |= {sys.base_prefix + "/lib": "/usr/lib", str(Path.home()) + "/": "/home/vllm/"}
    addresses = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False).stdout.split()
    return places | dict.fromkeys((address for address in addresses if len(address) > 6), "192.0.2.10")


def main(out: Path, names: list[str]) -> None:
    """Record the cases of these names, or all, and bring labels.json up to date."""
    out.mkdir(parents=True, exist_ok=True)
    cases = {case.name: case for case in CASES}
    if unknown := set(names) - set(cases):
        sys.exit(f"no such case: {', '.join(sorted(unknown))}")
    path, writing = out / "labels.json", threading.Lock()

    def one(case: Case) -> None:
        try:
            made = record(case, out)
        except Exception as error:  # one case that goes wrong must not cost the others
            print(f"{case.name}: not recorded: {str(error)[-1000:]}", flush=True)
            return
        with writing:
            labels = {item["name"]: item for item in json.loads(path.read_text())} if path.exists() else {}
            labels[case.name] = made
            path.write_text(json.dumps([labels[name] for name in sorted(labels)], indent=1) + "\n")
        print(f"{case.name}: exit code {made['exit_code']}, {made['files']}", flush=True)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(one, [cases[name] for name in names or cases]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
