"""Draw what commands print on terminals of 80 and 140 columns, in colour, as pictures for docs/terminal.md.

    python -m lab.draw_terminal          # writes docs/images/terminal-*.svg

Each command runs on a pseudo-terminal as a user's would; rich turns the bytes that it wrote there into an SVG.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import shlex
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from plimsoll.demo.balancer import free_port

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTHS = (80, 140)
COMMANDS = {
    "plan": "plimsoll plan --vllm 0.32.0 --gpu L4 -- vllm serve Qwen/Qwen3-8B",
    "doctor": "plimsoll doctor tests/captures/vllm-0.25.1-h200-failures/logits.log",
    "simulate": "plimsoll simulate synthetic:requests=2000,rate=25,prompt=1000,output=200 --num-blocks 4096",
    "guardctl": "plimsoll guardctl status",
}


def on_terminal(words: list[str], columns: int) -> str:
    """What a command writes to a terminal of this width."""
    process, terminal = pty.fork()
    if not process:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        for name in ("COLUMNS", "NO_COLOR"):
            os.environ.pop(name, None)
        os.execv(sys.executable, [sys.executable, "-m", *words])
    written = io.BytesIO()
    with contextlib.suppress(OSError):  # the terminal is gone when its process has ended
        while data := os.read(terminal, 1 << 16):
            written.write(data)
    os.waitpid(process, 0)
    os.close(terminal)
    return written.getvalue().decode().replace("\r\n", "\n")


def picture(command: str, text: str, columns: int) -> str:
    """The same as an SVG; its ids depend on nothing but the command."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", style="bold"), soft_wrap=True)
    console.print(Text.from_ansi(text), soft_wrap=True)
    return console.export_svg(title="", theme=MONOKAI, unique_id=f"terminal-{columns}")


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """A guard at its usual address that watches a busy stand-in, and one server that is not there."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        port = free_port()
        engine = _start("standin", "--port", str(port))
        guard = _start("guard", "--engine", f"http://127.0.0.1:{port}", "--engine", "http://127.0.0.1:9", "--every", "1s")
        try:
            time.sleep(20)
            yield
        finally:
            for process in (guard, engine):
                os.kill(process, 15)
                os.waitpid(process, 0)


def _start(*words: str) -> int:
    silent = os.open(os.devnull, os.O_WRONLY)
    actions = [(os.POSIX_SPAWN_DUP2, silent, number) for number in (1, 2)]
    return os.posix_spawn(sys.executable, [sys.executable, "-m", "plimsoll", *words], os.environ, file_actions=actions)


def main() -> None:
    """Draw all of them."""
    os.chdir(ROOT)
    with guarded():
        for name, command in COMMANDS.items():
            for columns in WIDTHS:
                text = on_terminal(shlex.split(command), columns)
                svg = picture(command, text, columns)
                (IMAGES / f"terminal-{name}-{columns}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
