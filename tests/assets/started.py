"""The command of generated files, as each program that reads them starts it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml


def started_words(files: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """The command as a real shell starts it, and as Docker and the kubelet would."""
    compose = yaml.safe_load(files["compose/compose.yaml"])["services"]["vllm"]["entrypoint"]
    pod = object_in(files["kubernetes/vllm.yaml"], "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["command"]
    return {
        "systemd": _said(files, folder, """printf '%s\\0' vllm "$@\""""),
        "compose": [word.replace("$$", "$") for word in compose],
        "kubernetes": [word.replace("$$", "$") if "$$" in word else word for word in pod],
    }


def environment_of(files: dict[str, str], folder: Path) -> dict[str, str]:
    """The variables that the start script hands on."""
    return dict(line.split("=", 1) for line in _said(files, folder, "/usr/bin/env -0"))


def _said(files: dict[str, str], folder: Path, does: str) -> list[str]:
    """What a program called `vllm` says when the start script has become it."""
    fake, script = folder / "vllm", folder / "start.sh"
    fake.write_text(f"#!/bin/sh\n{does}\n", encoding="utf-8")
    script.write_text(files["systemd/vllm-start.sh"], encoding="utf-8")
    fake.chmod(0o755)
    ran = subprocess.run(
        ["/bin/sh", str(script)], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    return ran.stdout.split("\0")[:-1]


def object_in(text: str, kind: str, name: str = "") -> dict[str, Any]:
    """The one object of a kind in a file of several."""
    found = [one for one in yaml.safe_load_all(text) if one["kind"] == kind and name in ("", one["metadata"]["name"])]
    assert len(found) == 1
    first: dict[str, Any] = found[0]
    return first
