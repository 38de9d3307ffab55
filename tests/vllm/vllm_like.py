"""Sources that have all that plimsoll.inside relies on, and nothing else; for the tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plimsoll.vllm.extension_points import NEEDS, Sources, Symbols


def sources(files: Mapping[str, str]) -> Sources:
    return Sources(files.get, lambda folder: [path for path in files if path.startswith(f"{folder}/")])


def files_that_meet_all() -> dict[str, str]:
    """The best way of every need, written out as classes, functions and words."""
    looks: dict[str, list[Symbols]] = {}
    for need in NEEDS:
        for look in need.ways[0].looks if need.ways else ():
            looks.setdefault(look.files[0], []).append(look)
    return {path: _text(wanted) for path, wanted in looks.items()}


def write_vllm(folder: Path, version: str, files: Mapping[str, str] | None = None) -> Path:
    """The same as an installed package with its metadata; the folder can be on a Python's path."""
    package = folder / "vllm"
    for path, text in {"__init__.py": "raise SystemExit('imported')\n", **(files or files_that_meet_all())}.items():
        target = package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    return package


def _text(looks: list[Symbols]) -> str:
    classes: dict[str, list[Symbols]] = {}
    lines = []
    for look in looks:
        classes.setdefault(look.owner, []).append(look)
        lines += [f"[{word!r}, {word!r}]" for word in look.words]
        lines += [f"state.{name} = 1" for name in look.assigned]
    for owner, wanted in classes.items():
        indent = "    " if owner else ""
        lines += [f"class {owner}:", "    pass"] if owner else []
        for look in wanted:
            lines += [
                f"{indent}def {name}(self, {', '.join(a for a in args if a != 'self')}): ..."
                for name, args in look.methods.items()
            ]
            lines += [f"{indent}async def {name}({', '.join(args)}): ..." for name, args in look.begins.items()]
            lines += [f"{indent}{name}: int = 0" if owner else f"self.{name} = 0" for name in look.attributes]
    return "\n".join([*lines, ""])
