"""One archive for a ticket: what is in it, what never is, and that nothing else is touched."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read.bundle import (
    CONTEXT_BYTES,
    Archive,
    ArchivePart,
    ExcerptLimits,
    TextFile,
    collect_here,
    kept,
    write_bundle,
    write_text,
)
from plimsoll.doctor.read.redact_text import WINDOW_CHARS, LineSplitter, shown_text
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.redaction import REDACTED
from tests.each import times
from tests.planted import KEY, PROMPT, SECRET, every_secret, leaks, members


def write(path: Path, parts: list[ArchivePart], *, force: bool = False) -> Archive:
    """Write an archive as the tests do."""
    return write_bundle(str(path), parts, made_with="plimsoll 0.0", at=1_700_000_000, force=force)


def text(name: str, content: str) -> ArchivePart:
    """A part that is a text."""
    return ArchivePart(name, "text", "A text.", content.encode())


def test_the_list_of_contents_comes_first_and_names_everything(tmp_path: Path) -> None:
    """A reader sees what each member is, where it came from, what is missing and what was hidden."""
    log = tmp_path / "server.log"
    log.write_text("INFO ready\n")
    parts = [text("report.txt", "all is well\n"), ArchivePart("logs/server.log", "text", "The log.", TextFile(str(log)))]
    written = write_bundle(str(tmp_path / "case.tar.gz"), parts, made_with="plimsoll 0.0", left_out=["snap.pickle: a snapshot"])
    found = members(tmp_path / "case.tar.gz")
    assert list(found) == ["case/CONTENTS.txt", "case/report.txt", "case/logs/server.log"]
    assert found["case/logs/server.log"] == "INFO ready\n"
    contents = found["case/CONTENTS.txt"]
    for said in (
        "plimsoll 0.0",
        "logs/server.log  11 bytes",
        "The log. (from server.log)",
        "snap.pickle: a snapshot",
        REDACTED,
    ):
        assert said in contents
    assert str(tmp_path) not in contents
    assert [member.name for member in written.members] == ["report.txt", "logs/server.log"]
    assert written.size_bytes == (tmp_path / "case.tar.gz").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["case.tar.gz", "server.log"]


def test_a_secret_in_every_kind_of_input_is_in_no_member(tmp_path: Path) -> None:
    """Logs plain and packed, a metrics page, nvidia-smi, JSON facts, names and source paths: nothing planted is left."""
    secrets = every_secret()
    whole = "\n\n".join(f"INFO 11-15 09:00:00 [a.py:1] next\n{secret}" for secret in secrets) + "\n"
    (tmp_path / "plain.log").write_text(whole)
    (tmp_path / "packed.log.gz").write_bytes(gzip.compress(whole.encode()))
    (tmp_path / "wide.log").write_bytes(whole.encode("utf-16"))
    named = tmp_path / f"hf_{SECRET}.log"
    named.write_text("fine\n")
    program = tmp_path / "smi"
    program.write_text(f"#!/bin/sh\ncat '{tmp_path}/plain.log'\n")
    program.chmod(0o755)
    facts = {"lines": secrets, "HF_TOKEN": SECRET, "nested": {"api_key": [SECRET, SECRET], f"hf_{SECRET}": 1}}
    parts = [
        *(ArchivePart(f"logs/{name}", "text", f"HF_TOKEN={SECRET}", TextFile(str(tmp_path / name)))
          for name in ("plain.log", "packed.log.gz", "wide.log", named.name, "missing.log")),
        text("metrics.txt", "".join(f'vllm:x{{a="{one}"}} 1\n' for one in secrets if not set(one) & {"\n", '"'})),
        ArchivePart("facts.json", "json", "Facts.", json.dumps(facts).encode()),
        *collect_here(nvidia_smi=(str(program),)),
    ]  # fmt: skip
    write(tmp_path / "case.tar.gz", parts)
    found = members(tmp_path / "case.tar.gz")
    for name, shown in found.items():
        assert not leaks(name), name
        for line in shown.splitlines():
            assert not leaks(line), (name, line)
    assert REDACTED in found["case/logs/plain.log"]
    assert "case/logs/packed.log" in found
    assert REDACTED in found["case/machine/nvidia-smi.txt"]


def test_users_text_is_in_no_member(tmp_path: Path) -> None:
    """Prompts go from logs and facts; lengths stay."""
    line = f"INFO 12-16 21:40:15 logger.py:39] Received request a: prompt: '{PROMPT}', prompt_token_ids: [1, 2], n: 1"
    facts = json.dumps({"evidence": [line], "prompt": PROMPT, "messages": [{"content": PROMPT}]}).encode()
    write(tmp_path / "a.tar", [text("a.log", f"{line}\nx\n"), ArchivePart("facts.json", "json", "Facts.", facts)])
    found = members(tmp_path / "a.tar")
    assert not any(leaks(shown) for shown in found.values())
    assert "[2 hidden], n: 1\nx\n" in found["a/a.log"]
    assert json.loads(found["a/facts.json"])["messages"] == "[hidden]"


def test_owners_of_home_folders_are_not_named(tmp_path: Path) -> None:
    """Paths in texts, facts, names and reasons are shown from ~ on, or by their last piece."""
    parts = [
        text("/home/annabelle/a.txt", "at /home/annabelle/vllm/x.py:3\n"),
        ArchivePart("f.json", "json", "From /home/annabelle/x.", json.dumps({"path": "/home/annabelle/y"}).encode()),
        ArchivePart("/home/annabelle/gone.log", "text", "Gone.", TextFile("/home/annabelle/gone.log")),
    ]
    write(tmp_path / "a.tar", parts)
    found = members(tmp_path / "a.tar")
    assert "annabelle" not in json.dumps(found)
    assert found["a/a.txt"] == "at ~/vllm/x.py:3\n"
    assert "gone.log: could not be opened" in found["a/CONTENTS.txt"]


@pytest.mark.parametrize("secret", [secret for secret in every_secret() if "\n" in secret.strip()])
def test_a_secret_across_a_border_of_blocks_is_hidden(secret: str) -> None:
    """Wherever the border would fall in a secret of several lines, the text comes out as if it had been one block."""
    ordinary = "INFO 11-15 09:00:00 [a.py:1] an ordinary line\n"
    lines = [ordinary, *(f"{line}\n" for line in secret.split("\n"))]
    for inside in range(1, len(lines) + 1):
        border = len("".join(lines[:inside]))
        room = border + WINDOW_CHARS - len("".join(lines))  # so much more, and the first block is full to the character
        last = room % len(ordinary) + len(ordinary)
        filler = [ordinary] * (room // len(ordinary) - 1) + ["x" * (last - 1) + "\n", ordinary]
        blocks = list(shown_text([*lines, *filler], block_chars=border))
        assert not leaks("".join(blocks)), blocks[0]
        assert blocks[-1].endswith(ordinary)


@pytest.mark.parametrize("secret", [f"HF_TOKEN={SECRET}", KEY, f"api-key:\n  - {SECRET}", f"postgres://me:{SECRET}@db/x",
                                    f"INFO 11-15 09:00:00 [b.py:1] Input prompt: a\n{PROMPT}\n{PROMPT}"])  # fmt: skip
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_secret_where_a_large_text_is_cut_is_hidden(secret: str, is_packed: bool, tmp_path: Path) -> None:
    """Start and end of a large text are kept; what lies across the two cuts shows nothing of itself."""
    limits = ExcerptLimits(head_bytes=WINDOW_CHARS + 50_000, tail_bytes=20_000)
    line = b"INFO 11-15 09:00:00 [a.py:1] an ordinary line of a log\n"
    planted = secret.encode() + b"\n"
    step = times(61, 23) if len(planted) < 500 else times(211, 97)
    for shift in range(0, len(planted) + 40, step):
        head = (line * 3_000)[: limits.head_bytes - shift - 20].rpartition(b"\n")[0] + b"\n"
        tail = (b"\n" + line * 500)[-limits.tail_bytes + shift :].partition(b"\n")[2]
        data = head + planted + line * (2 * CONTEXT_BYTES // len(line)) + planted + tail
        out = io.BytesIO()
        (tmp_path / "x.log").write_bytes(gzip.compress(data, 0) if is_packed else data)
        note = write_text(TextFile(str(tmp_path / "x.log")), out, limits)
        shown = out.getvalue().decode()
        assert not leaks(shown), shift
        assert "left out" in note
        assert "plimsoll left out" in shown
        assert shown.count("an ordinary line") > 500


def test_a_huge_text_costs_bounded_memory(tmp_path: Path) -> None:
    """Of a text that never fits into memory no more is held than its two ends."""
    block = gzip.compress(b"INFO an ordinary line of some length, as logs have them\n" * 20_000)
    (tmp_path / "x.log.gz").write_bytes(block * 300)
    tracemalloc.start()
    found = kept(TextFile(str(tmp_path / "x.log.gz")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 << 20
    assert found.left_out_bytes > 200 << 20
    assert sum(map(len, found.tail)) <= (24 << 20) + CONTEXT_BYTES + (1 << 20)


def test_a_very_long_line_is_cut_at_a_space() -> None:
    """A line of megabytes is kept to a part, and no secret is cut in half to be missed."""
    lines = LineSplitter()
    line = b"word " * 52_000 + f"postgres://me:{SECRET}@db ".encode() * 5_000
    shown = "".join(shown_text(lines.of([line[:1000], line[1000:] + b"\n", b"next\n"])))
    assert not leaks(shown)
    assert shown.endswith("was left out]\nnext\n")
    assert lines.cut == 1


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    """Snapshots, pipes, folders and packed archives are named and never copied."""
    (tmp_path / "snap.pickle").write_bytes(b"\x80\x04\x95" + b"abc" * 100)
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 10)
    os.mkfifo(tmp_path / "pipe")
    names = ["snap.pickle", "noise", "pipe", "."]
    written = write(tmp_path / "a.tar", [ArchivePart(name, "text", "x", TextFile(str(tmp_path / name))) for name in names])
    assert written.members == ()
    assert len(written.left_out) == 4
    assert "never copied" in written.left_out[0]


def test_the_same_parts_give_the_same_bytes(tmp_path: Path) -> None:
    """Two archives of the same are the same, and nobody owns their members."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.tar.gz", [text("a.txt", "x\n")])
    assert (tmp_path / "one/a.tar.gz").read_bytes() == (tmp_path / "two/a.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "one/a.tar.gz") as archive:
        assert {(entry.uid, entry.gid, entry.uname, entry.mtime) for entry in archive} == {(0, 0, "", 1_700_000_000)}


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    """One line says so; `force` replaces a plain file and nothing else."""
    target = tmp_path / "a.tar"
    target.write_text("mine")
    with pytest.raises(BadInput, match="already there"):
        write(target, [])
    assert target.read_text() == "mine"
    write(target, [text("a.txt", "x")], force=True)
    assert "a/a.txt" in members(target)
    link = tmp_path / "b.tar"
    link.symlink_to(target)
    with pytest.raises(BadInput, match="not a plain file"):
        write(link, [], force=True)


@pytest.mark.parametrize("name", ["a.zip", "a", ".tar", "a.tar.bz2", "a\0.tar", "none/a.tar"])
def test_a_name_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    """The ending says the format; anything else is one clear line and no file."""
    with pytest.raises(BadInput):
        write(tmp_path / name, [text("a", "x")])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_permission_is_the_worlds_fault(tmp_path: Path) -> None:
    """What the system refuses is said in one line, and leaves nothing behind."""
    if os.geteuid() == 0:
        pytest.skip("nothing is refused to root")
    tmp_path.chmod(0o500)
    with pytest.raises(WorldFailed):
        write(tmp_path / "a.tar", [text("a", "x")])


def test_zstd_is_written_and_read(tmp_path: Path) -> None:
    """The archive can be read back, and a packed log in it is plain."""
    log = tmp_path / "b.log.zst"
    log.write_bytes(zstandard.compress(f"HF_TOKEN={SECRET}\nfine\n".encode()))
    write(tmp_path / "a.tar.zst", [text("a.txt", "x\n"), ArchivePart("b.log.zst", "text", "Packed.", TextFile(str(log)))])
    with (tmp_path / "a.tar.zst").open("rb") as packed:
        (tmp_path / "a.tar").write_bytes(zstandard.ZstdDecompressor().stream_reader(packed).read())
    assert members(tmp_path / "a.tar")["a/b.log"] == f"HF_TOKEN={REDACTED}\nfine\n"


@given(names=st.lists(st.text("aA./\\~-\0\n é:*CONTENS.txt", max_size=30), max_size=8))
def test_members_stay_in_their_folder_under_harmless_names(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever a part is called, its member is a plain name of its own below the archive's folder."""
    target = tmp_path_factory.mktemp("x") / "case.tar"
    write(target, [text(name, "x") for name in names])
    with tarfile.open(target) as archive:
        found = [entry.name for entry in archive]
    assert len(found) == len(names) + 1 == len({name.casefold() for name in found})
    for name in found:
        assert name.isascii()
        assert name.isprintable()
        assert all(piece not in ("", ".", "..") and piece[0] not in ".-" for piece in name.split("/"))
        assert name.startswith("case/")
