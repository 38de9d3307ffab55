"""A real vLLM with containment in it and faults at hand: `SurviveServer`, and what its pages say of it."""

from __future__ import annotations

import json
import os
import re
import time
import tomllib
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.engine.server import EngineServer

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-the-lab-alone"
FAULTS_HOME = Path(__file__).resolve().parent / "faults"
CONTAINED = re.compile(
    r"plimsoll: survive: contained failure (\d+): a step of (\d+) tokens in (\d+) requests ran out of device memory at (\w+)"
)
SAMPLE = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? ([0-9.e+-]+|NaN|[+-]Inf)$", re.MULTILINE)


class SurviveServer(EngineServer):
    """One server of this model, with containment armed."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.faults_file = folder / "faults.json"
        site = plugin_site(folder / "site")
        own = {
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(site), str(FAULTS_HOME))),
            "VLLM_PLUGINS": "plimsoll_survive,survive_faults",
            "PLIMSOLL_LAB_FAULTS": str(self.faults_file),
            "PLIMSOLL_DIR": str(folder / "run"),
            "PLIMSOLL_SURVIVE_STORM": "0",
            "PLIMSOLL_TOKEN": TOKEN,
            "PLIMSOLL_SURVIVE": "1",
        }
        own_flags = ["--load-format", "auto", "--middleware", "plimsoll.inside.Gate"]
        super().__init__([*own_flags, *flags], {**own, **(env or {})}, log_path=folder / "vllm.log", port=port)
        self.command[2] = str(model)

    # Faults

    def set_faults(self, *rules: Mapping[str, Any], **kept: bool) -> None:
        """From now on these faults, and no others; `kept`: what containment cannot take back, see faults/survive_faults.py."""
        fresh = self.faults_file.with_suffix(".new")
        fresh.write_text(json.dumps({"faults": rules, **kept}), encoding="utf-8")
        fresh.rename(self.faults_file)

    def raised(self) -> list[dict[str, Any]]:
        """Every fault raised so far, oldest first."""
        path = Path(f"{self.faults_file}.raised")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_raised(self, count: int, limit_s: float = 60.0) -> None:
        """Return when so many faults have been raised; fail when they are not in time."""
        deadline = time.monotonic() + limit_s
        while len(self.raised()) < count:
            assert self.exit_code() is None, f"the server ended\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"{len(self.raised())} faults of {count} after {limit_s:.0f} s"
            time.sleep(0.02)

    # What it says

    def figures(self) -> dict[str, float]:
        """The samples of /metrics, summed over their labels."""
        found: dict[str, float] = {}
        for name, value in SAMPLE.findall(self.metrics()):
            if not name.endswith(("_created", "_bucket")):
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def survive_state(self) -> dict[str, Any]:
        """What GET /plimsoll/state says of containment."""
        request = urllib.request.Request(f"{self.url}/plimsoll/state", headers={"Authorization": f"Bearer {TOKEN}"})
        reply = self._ask(request, 30.0)
        assert reply.status == 200, reply.text
        return dict(reply.json()["survive"])

    def contained(self) -> list[tuple[int, int, int, str]]:
        """Of each contained failure that the log tells of: its number, tokens, requests and site."""
        return [(int(number), int(tokens), int(requests), site)
                for number, tokens, requests, site in CONTAINED.findall(self.log_text())]  # fmt: skip

    def wait_idle(self, limit_s: float = 30.0) -> dict[str, float]:
        """The figures of a server with nothing running and nothing waiting; fail when it does not come to that."""
        deadline = time.monotonic() + limit_s
        while True:
            found = self.figures()
            if found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0:
                return found
            assert time.monotonic() < deadline, f"not idle after {limit_s:.0f} s: {found}"
            time.sleep(0.2)

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory of the engine core and the worker."""
        found = {}
        for child in self.children():
            if child.name.startswith("VLLM::"):
                status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
                found[child.name.removeprefix("VLLM::")] = int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) << 10
        return found


def plugin_site(folder: Path) -> Path:
    """A folder that declares plimsoll's plugin as the installed package does."""
    about = folder / "plimsoll_survive_lab-1.dist-info"
    if not about.exists():
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plimsoll-survive-lab\nVersion: 1\n", encoding="utf-8")
        declared = declared_plugins(ROOT / "pyproject.toml")
        (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{declared}\n", encoding="utf-8")
    return folder


def declared_plugins(pyproject: Path) -> str:
    """The general plugins that the package declares, as lines of entry_points.txt."""
    plugins = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["entry-points"]["vllm.general_plugins"]
    return "\n".join(f"{name} = {where}" for name, where in plugins.items())
