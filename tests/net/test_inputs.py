"""What the user named: kinds by content, folders walked within bounds, a stream kept aside and then like any file."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import socket
import time
import zipfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.doctor.read.text import read_log
from plimsoll.errors import BadInput, TimedOut
from plimsoll.net import inputs
from plimsoll.net.inputs import BLOCK_BYTES, Budget, InputKind, Spool, classify, kind_of, text_blocks, unpacked, walked

CAPTURES = Path(__file__).parents[1] / "captures"
PAGE = b'# HELP vllm:num_requests_running n\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{a="b"} 1.0\n'
LOG = b"(EngineCore pid=7) INFO 11-15 08:00:00 [core.py:1] text\n"


def zipped(name: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, b"x")
    return data.getvalue()


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (LOG, InputKind.LOG),
        (gzip.compress(LOG, mtime=0), InputKind.LOG),
        (b"", InputKind.LOG),
        (PAGE, InputKind.METRICS),
        (gzip.compress(PAGE, mtime=0), InputKind.METRICS),
        (PAGE.decode().encode("utf-16"), InputKind.METRICS),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n" + PAGE, InputKind.METRICS),
        (b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:num_requests_waiting 3\n', InputKind.METRICS),
        (b"http_requests_total 3\n", InputKind.LOG),
        (LOG * 20 + PAGE, InputKind.LOG),
        (b"# HELP me, it does not start\n" + LOG * 5, InputKind.LOG),
        (pickle.dumps({"segments": []}), InputKind.SNAPSHOT),
        (pickle.dumps({"segments": []}, protocol=2), InputKind.SNAPSHOT),
        (zipped("archive/data.pkl"), InputKind.SNAPSHOT),
        (zipped("logs/a.log"), InputKind.LOG),
        (b'{"segments": []}', InputKind.LOG),
        (b'{\n "schema": "plimsoll.doctor/1", "findings": []}', InputKind.REPORT),
        (b'{"schema": "plimsoll.plan/1"}', InputKind.LOG),
        (b"+-----+\n| NVIDIA-SMI 550 |\n", InputKind.LOG),
    ],
)
def test_kinds_are_known_by_content(tmp_path: Path, data: bytes, kind: InputKind) -> None:
    """The name says nothing."""
    path = tmp_path / "snapshot.metrics.log.pickle"
    path.write_bytes(data)
    assert classify(str(path)) is kind


def test_real_pages_and_logs_and_urls_by_their_word() -> None:
    """Pages saved from vLLM are pages, its logs are logs; a URL is never looked for on the disk."""
    for path in CAPTURES.rglob("*metrics.txt*"):
        assert classify(str(path)) is InputKind.METRICS, path
    for path in CAPTURES.rglob("*.log"):
        assert classify(str(path)) is InputKind.LOG, path
    assert classify("http://localhost:8000/metrics") is InputKind.URL
    assert classify("HTTPS://prometheus.example/api") is InputKind.URL
    with pytest.raises(BadInput, match="no such file"):
        classify("httpd.log.that.is.not.there")


@given(st.binary(max_size=2000))
def test_any_bytes_have_a_kind(data: bytes) -> None:
    """Nothing breaks, whatever a file begins with."""
    for start in (
        data,
        b"\x1f\x8b" + data,
        b"\x28\xb5\x2f\xfd" + data,
        b"\x80" + data,
        b"PK\x03\x04" + data,
        b"# HELP " + data,
    ):
        assert kind_of(start) in InputKind


def test_words_stay_in_order_and_once(tmp_path: Path) -> None:
    """Files, URLs and the stream are kept as named; a file named twice is one."""
    log = tmp_path / "a.log"
    log.write_bytes(LOG)
    words = ["-", str(log), "http://localhost:8000/metrics", str(log)]
    assert walked(words).files == ["-", str(log), "http://localhost:8000/metrics"]
    with pytest.raises(BadInput, match="no such file"):
        walked([str(tmp_path / "missing")])
    with pytest.raises(BadInput):
        walked(["a\0b"])


def test_a_folder_gives_what_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted, files first; hidden, binary and empty files, pipes, sockets and broken links are passed over."""
    wanted = {"b.log": LOG, "a.log.gz": gzip.compress(LOG), "page": PAGE, "mem.pickle": pickle.dumps({}), "pods/x/0.log": LOG,
              "w.txt": LOG.decode().encode("utf-16"), "z.zst": b"\x28\xb5\x2f\xfd" + os.urandom(50)}  # fmt: skip
    passed = {".hidden": LOG, "model.safetensors": os.urandom(5000), "empty.log": b"", ".git/config": LOG,
              "weights.gz": gzip.compress(os.urandom(5000))}  # fmt: skip
    for name, data in {**wanted, **passed}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "gone.log").symlink_to(tmp_path / "nothing")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the address of a socket may not be long
        server.bind("s")
        found = walked([str(tmp_path)]).files
    assert found == [
        str(tmp_path / name) for name in ("a.log.gz", "b.log", "mem.pickle", "page", "w.txt", "z.zst", "pods/x/0.log")
    ]
    assert walked([str(tmp_path / "fifo")]).files == [str(tmp_path / "fifo")], "a pipe is read where the user names it"


def test_links_lead_nowhere_twice(tmp_path: Path) -> None:
    """A loop of links ends, and a file with two names is read once."""
    (tmp_path / "pods").mkdir()
    (tmp_path / "pods" / "0.log").write_bytes(LOG)
    (tmp_path / "pods" / "loop").symlink_to(tmp_path)
    (tmp_path / "containers").symlink_to(tmp_path / "pods")
    assert len(walked([str(tmp_path)]).files) == 1


def test_folders_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many files or too deep folders are left out, and the files are counted."""
    monkeypatch.setattr(inputs, "MOST_FILES", 3)
    for n in range(5):
        (tmp_path / f"{n}.log").write_bytes(LOG)
    deep = tmp_path.joinpath(*["d"] * (inputs.DEEPEST_FOLDER + 2))
    deep.mkdir(parents=True)
    (deep / "x.log").write_bytes(LOG)
    found = walked([str(tmp_path)])
    assert [Path(path).name for path in found.files] == ["0.log", "1.log", "2.log"]
    assert found.left_out == 2
    with pytest.raises(BadInput, match="no log, metrics page or snapshot in this folder"):
        walked([str(tmp_path / "d")])


def test_a_stream_is_kept_and_then_like_a_file() -> None:
    """What was piped is classified and read under the name the user gave it."""
    with Spool(io.BytesIO(PAGE)) as path:
        assert classify(path) is InputKind.METRICS
    with Spool(io.BytesIO(LOG * 3)) as path:
        assert classify(path) is InputKind.LOG
        log = read_log(path, source="-")
        assert (log.source, len(log.lines)) == ("-", 3)
        assert read_log(path).lines == log.lines, "it can be read again"


def test_a_stream_that_never_ends_stops_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came is used and known to be cut; nothing at all timed out; a flood is cut at the cap."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream, os.fdopen(writer, "wb", buffering=0) as out:
        with pytest.raises(TimedOut, match="nothing came in time"):
            Spool(stream, deadline=time.monotonic() + 0.1)
        out.write(LOG)
        spool = Spool(stream, deadline=time.monotonic() + 1.0)
        with spool as path:
            assert Path(path).read_bytes() == LOG
        assert spool.was_cut
    monkeypatch.setattr(inputs, "SPOOL_MAX_BYTES", 1000)
    flood = Spool(io.BytesIO(LOG * 50_000))
    with flood:
        assert flood.was_cut
        assert flood.size_bytes < 2 << 20


def test_a_folder_gives_a_packed_snapshot(tmp_path: Path) -> None:
    """What is read when it is named is found in its folder, too; another program's packed bytes are not."""
    (tmp_path / "split.pickle.gz").write_bytes(gzip.compress(pickle.dumps({"segments": []})))
    (tmp_path / "weights.gz").write_bytes(gzip.compress(os.urandom(5000)))
    assert walked([str(tmp_path)]).files == [str(tmp_path / "split.pickle.gz")]


TEXT = "".join(f"line {number} of a log\n" for number in range(200_000)).encode()


class Trickle(io.BytesIO):
    """Gives a few bytes at a time, as a slow pipe does."""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(min(7, len(buffer)))
        buffer[: len(data)] = data
        return len(data)


def _blocks(data: bytes) -> list[bytes]:
    return list(text_blocks("x", io.BytesIO(data), Budget()))


def test_members_and_frames_are_one_text_and_no_block_is_large() -> None:
    """With the zeros that tapes leave behind a member, and packed twice."""
    members = gzip.compress(TEXT[:1000]) + b"\0" * 512 + gzip.compress(TEXT[1000:])
    frames = zstandard.compress(TEXT[:1000]) + zstandard.compress(TEXT[1000:])
    for packed in (members, frames, gzip.compress(frames), zstandard.compress(members)):
        blocks = _blocks(packed)
        assert b"".join(blocks) == TEXT
        assert max(map(len, blocks)) <= BLOCK_BYTES


def test_little_by_little_it_is_the_same_text() -> None:
    """What is known by its first bytes is known also where they come late; UTF-16 of any kind comes out as UTF-8."""
    text = TEXT[:5000]
    for packed in (gzip.compress(text), zstandard.compress(text), gzip.compress(text.decode().encode("utf-16"))):
        assert b"".join(text_blocks("x", unpacked("x", Trickle(packed)), Budget())) == text
    wide = "Größe 🙂 of what was written\n" * 60_000
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        assert b"".join(_blocks(wide.encode(encoding))).decode() == wide


def test_what_came_before_the_damage_is_kept_unless_it_must_be_whole() -> None:
    """A log that is being packed has no end yet; what only looks packed never had a beginning."""
    packed = gzip.compress(TEXT)
    half = packed[: len(packed) // 2]
    kept = b"".join(_blocks(half))
    assert len(kept) > len(TEXT) // 4
    assert TEXT.startswith(kept)
    assert b"".join(_blocks(packed + b"spoilt")) == TEXT
    with pytest.raises(BadInput, match="x: cut or damaged gzip data"):
        unpacked("x", io.BytesIO(half), whole=True).read()
    for spoilt in (b"\x1f\x8b not packed", b"\x28\xb5\x2f\xfd" + b"\xff" * 100):
        with pytest.raises(BadInput, match="x: looks like"):
            _blocks(spoilt)
    wide = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=31)).compressobj()
    with pytest.raises(BadInput, match="zstd with a very long window; unpack it first"):
        _blocks(wide.compress(TEXT) + wide.flush())
