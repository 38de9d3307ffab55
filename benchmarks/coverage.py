"""Counts the models that `plan` knows by name, without network: the lists in benchmarks/names, and vLLM's architectures.

    python -m benchmarks.coverage [LIST.txt...]

A name counts where the catalogue has it or a model that it derives from, and its shape can be read. An architecture counts
where the catalogue has a model of it. What is not answered is named.
"""

from __future__ import annotations

import sys
from pathlib import Path

from plimsoll.errors import PlimsollError
from plimsoll.models.files import bundled_model, bundled_names, read_model
from plimsoll.models.shape import ModelShape
from plimsoll.vllm import versions

NAMES = Path(__file__).parent / "names"
NOWHERE = {"HOME": "/nowhere", "HF_HOME": "/nowhere"}
WANTED = 0.85


def answer(name: str) -> str | None:
    """How a name is known (`catalogue` or `derived`); None where it is not."""
    try:
        files = read_model(name, hub=None, environment=NOWHERE)
        ModelShape.from_config(files.config)
    except PlimsollError:
        return None
    return "derived" if files.source.startswith("derived") else "catalogue"


def names_in(path: Path) -> list[str]:
    """The ids of a list: one a line, comments left out."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def families() -> tuple[list[str], list[str]]:
    """The architectures that the newest release registers: those of which the catalogue has a model, and the others."""
    models = [model for name in bundled_names() if (model := bundled_model(name)) is not None]
    listed = (model.config.get("architectures") for model in models)
    there = {word for words in listed if isinstance(words, list) for word in words}
    registered = [name for name, spans in versions.rows("architectures").items() if spans[-1]["to"] == versions.newest()]
    return [name for name in registered if name in there], [name for name in registered if name not in there]


def main() -> int:
    """Print the shares; 1 where fewer names are answered than wanted."""
    print(f"{'list':<22}{'names':>7}{'answered':>10}{'derived':>9}{'share':>8}")
    lists = [Path(word) for word in sys.argv[1:]] or sorted(NAMES.glob("*.txt"))
    total, known, missing = 0, 0, list[str]()
    for path in lists:
        answers = {name: answer(name) for name in names_in(path)}
        count = sum(how is not None for how in answers.values())
        derived = sum(how == "derived" for how in answers.values())
        print(f"{path.stem:<22}{len(answers):>7}{count:>10}{derived:>9}{count / len(answers):>8.0%}")
        total, known = total + len(answers), known + count
        missing += [name for name, how in answers.items() if how is None]
    print(f"{'all':<22}{total:>7}{known:>10}{'':>9}{known / total:>8.0%}")
    for name in missing:
        print(f"  {name}: not bundled; a local folder or the hub answers")
    there, others = families()
    print(f"\nvLLM {versions.newest()} registers {len(there) + len(others)} architectures; with a bundled model: {len(there)}")
    print(f"  only from a local folder or the hub: {', '.join(others)}")
    return 1 if known < WANTED * total else 0


if __name__ == "__main__":
    raise SystemExit(main())
