"""What every command answers, held against recordings: keys, codes, numbers, flags and exit codes stay; sentences may change.

The invocations are in captures/outputs/cases.toml, what they gave in captures/outputs/COMMAND.json, and their --help in
help.json. Whoever changes an answer on purpose records it again and reads the difference before it is committed:

    python -m tests.test_outputs --record            all of them
    python -m tests.test_outputs --record plan tune  only those of these commands

A string with a space in it counts as a sentence, written as `~` and the numbers, flags and finding codes that it names, in
order; two of them are the same if they name the same, in any order. So is text on a screen. Command lines, expressions and
lines quoted from a log are kept word for word. What differs from run to run is masked. Of a long text only a digest is kept.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import hashlib
import html
import io
import json
import math
import os
import re
import shlex
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from plimsoll.cli.main import main
from tests.each import each

CAPTURES = Path(__file__).resolve().parent / "captures"
OUTPUTS = CAPTURES / "outputs"
CASES: dict[str, dict[str, str]] = tomllib.loads((OUTPUTS / "cases.toml").read_text(encoding="utf-8"))
NAMES = [(command, name) for command, cases in CASES.items() for name in cases]
FEWEST = {"plan": 20, "flags": 10, "simulate": 10, "doctor": 40, "assets": 8, "guard": 8}  # so that none is lost unseen
LONG_TEXT = 300  # tokens; beyond it a digest
COMPARED_TO = 1e-9  # of a float: another machine may add in another order

FAMILY = "(?:startup|runtime|allocator|gpu|host|kv|prefix-cache|engine|other)"
CODE = rf"{FAMILY}\.(?!(?:py|json|log|sh)\b)[a-z]+(?:-[a-z]+)*(?![\w/(-]|\.\w)"
TOKEN = re.compile(rf"(?<![\w./-]){CODE}|(?<![\w-])--[a-z][\w-]*|(?:(?<![\w.,)\]-])-)?\d+(?:[.,]\d+)*")
COMMAND_LINE = re.compile(r"(?:env )?(?:[A-Z_][A-Z0-9_]*=\S* )*(?:vllm serve|python\S* -m vllm)\b")
# Keys whose strings are no prose: names, expressions, command lines.
EXACT = set("name expr query definition rewritten series values args command legendFormat".split())
MASKED_KEYS = {"wall_seconds", "at", "incident"}
MASKS = [
    (re.compile(r"(?:(?:\d{4}-)?\d\d-\d\d[T ]|\b)\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"), "CLOCK"),
    (re.compile(r"\b[0-9a-f]{40,64}\b"), "DIGEST"),
    (re.compile(r"\bpid=\d+"), "PID"),
    (re.compile(r"\b(?:replay took|replayed in)\s+[\d.,]+\s*\w+"), "TOOK"),  # of this machine, not of the server
    (re.compile(r"^plimsoll(?:\.\w+)+:\w+$"), "MODULE"),  # where an entry point leads; what users type has no colon
]
SENTENCE_LINE = re.compile(r"\s*(?:Description=|echo |printf |//)")  # in files that are otherwise settings, word for word
PAGE_PARTS = ("svg", "table", "tr", "details")


def tokens(text: str) -> str:
    """The numbers, flags and codes that a text names, in order; of many only how many, and a digest of them sorted."""
    found = TOKEN.findall(text)
    if len(found) > LONG_TEXT:
        found = [str(len(found)), hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()]
    return " ".join(["~", *found])


class Place:
    """A folder of one run's own, with the inputs in it, and what must not be seen of it in what is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.version = said(["--version"])[1].split()[-1]
        for name, target in (("captures", CAPTURES), ("inputs", OUTPUTS / "inputs")):
            (self.folder / name).symlink_to(target)
        for tree in (OUTPUTS / "inputs").glob("*.tree.json"):
            for path, text in json.loads(tree.read_text(encoding="utf-8")).items():
                target = self.folder / tree.name.removesuffix(".tree.json") / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
        self.before = set(self.folder.rglob("*"))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Run here, with nothing of the user's own around: no settings, no tokens, no hub, nothing learned before."""
        before = dict(os.environ)
        ours = ("PLIMSOLL_", "VLLM_", "HF_", "KUBERNETES_", "POD_", "STATE_DIRECTORY", "NOTIFY_SOCKET")
        for name in before:
            if name.startswith(ours):
                del os.environ[name]
        hidden = {name: str(self.folder / ".hidden") for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HF_HOME")}
        (self.folder / ".hidden").mkdir(exist_ok=True)
        os.environ.update(hidden, HF_HUB_OFFLINE="1")
        try:
            with contextlib.chdir(self.folder):
                yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def masked(self, text: str) -> str:
        """Without folders of this machine, times, digests and the version of this package."""
        folders = {self.folder: "HERE", OUTPUTS: "OUTPUTS", CAPTURES: "CAPTURES", CAPTURES.parents[1]: "ROOT"}
        for folder, name in folders.items():
            text = text.replace(str(folder), name)
        version = re.escape(self.version)
        text = re.sub(rf"(?<=plimsoll[-_ =@])v?{version}|(?<=inside-){version}", "VERSION", text)
        for pattern, name in MASKS:
            text = pattern.sub(name, text)
        return text

    def reduced(self, value: Any, key: str = "") -> Any:
        """A value as it is kept: sentences down to what they name."""
        if key in MASKED_KEYS and isinstance(value, int | float | str):
            return "MASKED"
        if isinstance(value, dict):
            if str(value.get("path", "")).endswith(".whl"):
                value = {**value, "bytes": "MASKED", "members": "MASKED"}
            is_quoted = isinstance(value.get("line"), int) and "source" in value
            pairs = [(k, self.masked(v) if is_quoted and k == "text" else self.reduced(v, k)) for k, v in value.items()]
            return {self.masked(k): v for k, v in pairs}
        if isinstance(value, list):
            return [self.reduced(one, key) for one in value]
        if not isinstance(value, str):
            return value if value is None or isinstance(value, bool | int | float) else self.masked(str(value))
        text = self.masked(value)
        is_prose = any(c.isspace() for c in text.strip()) and key not in EXACT and not COMMAND_LINE.match(text)
        return tokens(text) if is_prose else text

    def text(self, text: str) -> Any:
        """What stood on a screen: one object, a line of JSON each, or words."""
        try:
            return self.reduced(json.loads(text))
        except ValueError:
            pass
        try:
            return [self.reduced(json.loads(line)) for line in text.splitlines()] if text else ""
        except ValueError:
            return tokens(self.masked(text))

    def files(self) -> dict[str, Any]:
        new = [p for p in self.folder.rglob("*") if p not in self.before and p.is_file() and ".hidden" not in p.parts]
        return {self.masked(p.relative_to(self.folder).as_posix()): self.file(p) for p in sorted(new)}

    def file(self, path: Path) -> Any:
        """One of them, by its kind; of archives only the names, and of a wheel none: its modules may move."""
        if path.suffix == ".whl":
            return "a wheel"
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as packed:
                return sorted(self.masked(name) for name in packed.getnames() if "/machine/" not in name)
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yml", ".yaml"):
            return [self.reduced(one) for one in yaml.safe_load_all(text)]
        if path.suffix == ".toml":
            return self.reduced(tomllib.loads(text))
        if path.suffix == ".csv":
            rows = list(csv.reader(io.StringIO(text)))
            return {"columns": rows[0], "rows": len(rows) - 1, "digest": hashlib.sha256(text.encode()).hexdigest()}
        if path.suffix == ".html":
            shown = html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(style|script|noscript|svg)\b.*?</\1>", " ", text)))
            return {"says": tokens(self.masked(shown)), **{part: len(re.findall(rf"<{part}\b", text)) for part in PAGE_PARTS}}
        if path.suffix == ".json":
            return self.text(text)
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        return [tokens(self.masked(line)) if SENTENCE_LINE.match(line) else self.masked(line) for line in lines]


def said(words: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
    """The exit code and both outputs of one call, in this process."""
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        before = sys.stdin, sys.stdout, sys.stderr
        for number, file in enumerate(kept, 1):  # also of the descriptors: guard writes there
            before[number].flush()
            stack.callback(os.dup2, stack.enter_context(os.fdopen(os.dup(number), "wb")).fileno(), number)
            os.dup2(file.fileno(), number)
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        try:
            code = main(words)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdin, sys.stdout, sys.stderr = before
        out, err = (os.pread(file.fileno(), 1 << 26, 0).decode() for file in kept)
        return code, out, err


def answer(command: str, words: str, folder: Path) -> dict[str, Any]:
    place = Place(folder)
    words, _, source = words.partition(" < ")
    with place.entered():
        code, out, err = said([command, *shlex.split(words)], Path(source).read_bytes() if source else b"")
    # That the scheduler is compiled first is said once a machine.
    lines = [line for line in err.splitlines() if "compil" not in line]
    said_wrong = tokens(place.masked("\n".join(lines))) if lines else ""
    kept: dict[str, Any] = {"code": code, "out": place.text(out), "err": said_wrong}
    if code == 2:
        kept["complaints"] = len(lines)
    files = place.files()
    return {**kept, "files": files} if files else kept


def options(command: str) -> list[str]:
    code, out, _ = said([command, "--help"])
    assert code == 0
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", out)))


def commands() -> list[str]:
    return [line.split()[0] for line in said(["--help"])[1].splitlines() if re.match(r"  [a-z]", line)]


def recorded(command: str) -> dict[str, Any]:
    return dict(json.loads((OUTPUTS / f"{command}.json").read_text(encoding="utf-8")))


def differences(kept: Any, found: Any, where: str = "") -> list[str]:
    """Where two answers are not the same, in words; empty if nowhere."""
    if isinstance(kept, dict) and isinstance(found, dict):
        odd = [f"{where}/{key}: {'gone' if key in kept else 'new'}" for key in sorted(kept.keys() ^ found.keys())]
        return odd + [line for key in kept if key in found for line in differences(kept[key], found[key], f"{where}/{key}")]
    if isinstance(kept, list) and isinstance(found, list):
        odd = [f"{where}: {len(kept)} became {len(found)}"] if len(kept) != len(found) else []
        pairs = enumerate(zip(kept, found, strict=False))
        return odd + [line for place, (one, other) in pairs for line in differences(one, other, f"{where}/{place}")]
    if isinstance(kept, str) and isinstance(found, str) and kept[:1] == found[:1] == "~":
        is_same = sorted(kept.split()) == sorted(found.split())
    elif isinstance(kept, float) and isinstance(found, float):
        is_same = math.isclose(kept, found, rel_tol=COMPARED_TO) or kept == found
    else:
        is_same = type(kept) is type(found) and kept == found
    return [] if is_same else [f"{where}: {kept!r} became {found!r}"]


@pytest.mark.parametrize(("command", "name"), NAMES, ids=str)
def test_an_invocation_answers_as_it_was_recorded(command: str, name: str, tmp_path: Path) -> None:
    """The same exit code, keys, numbers, flags, codes and files, whatever the sentences say."""
    found = json.loads(json.dumps(answer(command, CASES[command][name], tmp_path)))
    odd = differences(recorded(command)[name], found)
    assert not odd, "\n".join(odd[:40])


@pytest.mark.parametrize("command", CASES)
def test_help_names_the_options_it_was_recorded_with(command: str) -> None:
    """No option is lost or renamed, and none comes unseen."""
    assert options(command) == recorded("help")[command]


def test_every_command_is_recorded_and_nothing_of_a_machine() -> None:
    """Cases, recordings and the first screen agree, none has lost most of its cases; no folder of whoever recorded it."""
    assert sorted(commands()) == sorted(CASES) == sorted(recorded("help"))
    for command, cases in CASES.items():
        assert set(recorded(command)) == set(cases)
        assert len(cases) >= FEWEST.get(command, 1)
    files = list(OUTPUTS.glob("*.json"))
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert [place for place in (str(CAPTURES.parents[1]), f"{tempfile.gettempdir()}/pytest") if place in text] == []
    assert sum(path.stat().st_size for path in files) < 2_000_000


CHANGES: list[tuple[tuple[str | int, ...], Any]] = [
    (("code",), 0), (("out", "fits"), True), (("out", "kv", "num_blocks"), 1), (("out", "ledger", "kv", "value"), 0.5),
    (("out", "findings", 0, "code"), "startup.graph-capture"), (("out", "findings", 0), None), (("out", "gpu", "name"), None),
    (("out", "schema"), "plimsoll.plan/2"), (("out", "flags", "items", 0, "status"), "ok"),
]  # fmt: skip


@each(("place", "value"), CHANGES)
def test_a_change_is_seen(place: tuple[str | int, ...], value: Any) -> None:
    """One number, code or flag that is changed, or one key that is taken away (None), is an objection that names its place."""
    kept = recorded("plan")["too_small_json"]
    changed = copy.deepcopy(kept)
    inner = changed
    for step in place[:-1]:
        inner = inner[step]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    assert differences(kept, kept) == []
    odd = differences(kept, changed)
    assert odd
    assert str(place[0]) in odd[0]


def test_sentences_are_free_and_what_they_name_is_not() -> None:
    """Another wording passes; another number, flag or code in it does not, nor does a sentence that is empty."""
    one = tokens("kv.saturated: 18 requests fit; lower --max-num-seqs to 18")
    assert differences(one, tokens("With --max-num-seqs 18 all 18 fit, see kv.saturated.")) == []
    for other in ("kv.saturated: 18 fit; --max-num-seqs 19", "18 fit: --max-num-seqs 18", "kv.saturated: 18 fit --max-seqs 18"):
        assert differences(one, tokens(other))
    assert differences(tokens("not known"), "")


def record(wanted: list[str]) -> None:
    for command in wanted or CASES:
        kept = {}
        for name, words in CASES[command].items():
            with tempfile.TemporaryDirectory() as folder:
                kept[name] = answer(command, words, Path(folder))
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in kept.items())
        (OUTPUTS / f"{command}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    lines = ",\n".join(f"{json.dumps(command)}: {json.dumps(options(command))}" for command in CASES)
    (OUTPUTS / "help.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--record"]:
        sys.exit("python -m tests.test_outputs --record [COMMAND...]")
    record(sys.argv[2:])
