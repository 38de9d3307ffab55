"""Writes plimsoll.inside as a wheel of its own: no dependency, no build tool, the same bytes on every machine.

It holds plimsoll.inside and the few modules that it imports. pip installs it. Its folder, unpacked, can be on PYTHONPATH, and
so can the file itself, because nothing in it is compressed or needs to be a file of its own. So it works in a stock vLLM image
without a build.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from pathlib import Path
from typing import NamedTuple

import plimsoll
from plimsoll.assets.files import write_files
from plimsoll.assets.rendering import render
from plimsoll.errors import WorldFailed

DISTRIBUTION = "plimsoll-inside"
ENTRY_POINTS = {
    "vllm.general_plugins": {
        "plimsoll_probe": "plimsoll.inside.plugin:install",
        "plimsoll_door": "plimsoll.inside.door:install",
        "plimsoll_survive": "plimsoll.inside.survive.plugin:install",
    },
    "vllm.stat_logger_plugins": {"plimsoll": "plimsoll.inside.stat_logger:StatLogger"},
}
_BESIDE = ("__init__.py", "errors.py", "py.typed")
_NO_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold
# With the file on PYTHONPATH in a shell, the command `plimsoll` would find this package first, and no command in it.
_LETS_PASS = b"""
from pkgutil import extend_path as _extended

__path__ = [*(p for p in _extended(__path__, __name__) if p not in __path__), *__path__]
"""


class Wheel(NamedTuple):
    """The wheel's bytes, and the file name that pip requires."""

    name: str
    content: bytes
    members: tuple[str, ...]


def make_wheel(package: Path | None = None) -> Wheel:
    """Returns the wheel of the plimsoll package in a folder; by default the running one."""
    root = package or Path(plimsoll.__file__).parent
    info = f"{DISTRIBUTION.replace('-', '_')}-{plimsoll.__version__}.dist-info"
    try:
        files = {f"plimsoll/{path}": (root / path).read_bytes() for path in _paths(root)}
    except OSError as error:
        raise WorldFailed(f"{error.filename}: cannot be read: {error.strerror or error}") from None
    files["plimsoll/__init__.py"] += _LETS_PASS
    files[f"{info}/METADATA"] = render("METADATA", name=DISTRIBUTION, version=plimsoll.__version__).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: plimsoll\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    groups = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in ENTRY_POINTS.items()]
    files[f"{info}/entry_points.txt"] = "\n".join(groups).encode()
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(content).digest()) for name, content in files.items()}
    records = [f"{name},sha256={digests[name].rstrip(b'=').decode()},{len(content)}\n" for name, content in files.items()]
    files[f"{info}/RECORD"] = "".join([*records, f"{info}/RECORD,,\n"]).encode()
    buffer = io.BytesIO()
    # Without times and without compression: compressors differ from machine to machine.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _NO_TIME)
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content)
    return Wheel(wheel_name(), buffer.getvalue(), tuple(files))


def wheel_name() -> str:
    return f"{DISTRIBUTION.replace('-', '_')}-{plimsoll.__version__}-py3-none-any.whl"


def _paths(root: Path) -> list[str]:
    """Returns paths in the package: all of plimsoll.inside, and our modules that it imports."""
    own = (path for kind in ("*.py", "*.json") for path in (root / "inside").rglob(kind))
    return sorted([*_BESIDE, *(path.relative_to(root).as_posix() for path in own)])


def write_wheel(wheel: Wheel, where: str) -> Path:
    """Writes the wheel into a folder, which is made if needed, or to the named .whl file; completely or not at all."""
    path = Path(where) if where.endswith(".whl") else Path(where) / wheel.name
    write_files(str(path.parent), {path.name: wheel.content})
    return path
