"""The wheel that users install, built by the real hatchling: nothing that the repository ships is left out of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_every_module_template_and_table(tmp_path: Path) -> None:
    """Everything under src/plimsoll that git has, and the pages that `plimsoll doctor --explain` prints."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("plimsoll_line-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    listed = subprocess.run(
        ["git", "ls-files", "src/plimsoll", "docs/findings"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shipped = {
        path.removeprefix("src/").replace("docs/findings", "plimsoll/findings")
        for path in listed.stdout.split()
        if (ROOT / path).is_file()
    }
    assert shipped - packed == set()
    assert "plimsoll/assets/templates/start.sh.j2" in packed
