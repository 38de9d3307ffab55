"""What asking the hub promises, against a real HTTP server on loopback, however it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from plimsoll.errors import BadInput, TimedOut, TooLarge, WorldFailed
from plimsoll.models.files import cache_file, read_model
from plimsoll.models.hub import ENDPOINT, Hub
from plimsoll.models.safetensors import TensorInfo
from tests.models.hub_server import COMMIT, CONFIG, TOKEN, Handler, Server, hub_of, running, shard

pytestmark = pytest.mark.usefixtures("no_proxy")


@pytest.fixture
def storage() -> Iterator[Server]:
    """Another host, as the storage behind the hub is."""
    with running() as hub:
        yield hub


def test_config_quantisation_and_headers_are_fetched_in_small_parts(server: Server) -> None:
    """Eight bytes and a header of each shard, no data; the tensors and the total are those of the files."""
    first, second = shard(a=50_000), shard(b=60_000)
    server.files |= {
        "one.safetensors": first,
        "two.safetensors": second,
        "hf_quant_config.json": b'{"quantization": {"quant_algo": "FP8"}}',
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}, "metadata": {"total_size": 110_000}}
        ).encode(),
    }
    found = hub_of(server).read("org/name")
    assert found.config == CONFIG | {"quantization_config": {"quantization": {"quant_algo": "FP8"}}}
    assert found.tensors == (TensorInfo("a", "U8", (50_000,)), TensorInfo("b", "U8", (60_000,)))
    assert (found.total_bytes, found.notes) == (110_000, ())
    assert found.source == f"127.0.0.1:{server.server_address[1]} snapshot {COMMIT[:12]}"
    ranges = {asked for path, _, asked in server.seen if path.endswith("one.safetensors")}
    length = int.from_bytes(first[:8], "little")
    assert ranges == {"bytes=0-7", f"bytes=8-{7 + length}"}
    assert server.seen[0][0] == "/org/name/resolve/main/config.json"
    assert server.seen[-1][0].startswith(f"/org/name/resolve/{COMMIT}/")


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_single_file_is_enough(server: Server, knows_ranges: bool) -> None:
    """Without an index, model.safetensors; a server that knows no ranges is heard out only as far as needed."""
    server.knows_ranges = knows_ranges
    server.files["model.safetensors"] = shard(a=70_000)
    found = hub_of(server).read("name")
    assert found.tensors == (TensorInfo("a", "U8", (70_000,)),)
    assert found.total_bytes == 70_000


@pytest.mark.parametrize(
    ("files", "total"),
    [
        ({"pytorch_model.bin.index.json": b'{"weight_map": {"a": "x.bin"}, "metadata": {"total_size": 9}}'}, 9),
        ({"pytorch_model.bin": b"x" * 123}, 123),
        ({}, None),
    ],
)
def test_pickles_give_their_size_alone(server: Server, files: dict[str, bytes], total: int | None) -> None:
    """A pickle is not downloaded; a repository without weights says so."""
    server.files |= files
    found = hub_of(server).read("org/name")
    assert (found.tensors, found.total_bytes) == (None, total)
    assert len(found.notes) == 1
    assert all(asked == "bytes=0-0" for path, _, asked in server.seen if path.endswith(".bin"))


def test_the_token_is_not_sent_to_another_host(server: Server, storage: Server) -> None:
    """The hub sees the token, the storage it redirects to never does, and the range goes along."""
    storage.files["model.safetensors"] = shard(a=10)
    server.acts["model.safetensors"] = lambda h: h.answer(302, b"", Location=f"{storage.url}/blob/model.safetensors?sig=1")
    storage.acts["model.safetensors?sig=1"] = lambda h: h.serve(storage.files["model.safetensors"])
    found = hub_of(server, token=TOKEN).read("org/name")
    assert found.total_bytes == 10
    assert {token for _, token, _ in server.seen} == {f"Bearer {TOKEN}"}
    assert [(token, asked is not None) for _, token, asked in storage.seen] == [(None, True), (None, True)]


def test_a_redirect_that_stays_on_the_hub_keeps_the_token(server: Server) -> None:
    """A renamed repository is still the hub's."""
    server.acts["config.json"] = lambda h: (
        h.serve(server.files["config.json"]) if "renamed" in h.path else h.answer(307, b"", Location="/renamed/config.json")
    )
    assert hub_of(server, token=TOKEN).read("org/name").config == CONFIG
    assert server.seen[1] == ("/renamed/config.json", f"Bearer {TOKEN}", None)


def test_without_a_token_none_is_sent(server: Server) -> None:
    """No Authorization header at all."""
    hub_of(server).read("org/name")
    assert {token for _, token, _ in server.seen} == {None}


def test_a_gated_model_is_one_line_about_the_token(server: Server) -> None:
    """401 and 403 are the user's to solve, so exit 2; the token itself is never shown."""
    server.acts["config.json"] = lambda h: h.refuse(
        403 if h.headers.get("Authorization") else 401, "GatedRepo" if h.headers.get("Authorization") else "RepoNotFound"
    )
    with pytest.raises(BadInput, match=r"gated, private or not there .* no HF_TOKEN is set"):
        hub_of(server).read("org/name")
    with pytest.raises(BadInput, match=r"gated on .* refused or has no access") as caught:
        hub_of(server, token=TOKEN).read("org/name")
    assert TOKEN not in str(caught.value)


def test_what_is_not_there_names_the_nearest(server: Server) -> None:
    """404 of the repository offers bundled names; of a revision or of config.json it says which."""
    for code, says in (
        ("RepoNotFound", "not on 127.* bundled model such as Qwen/Qwen3-8B"),
        ("RevisionNotFound", "no revision 'main'"),
        ("EntryNotFound", r"has no config\.json"),
    ):
        server.acts["config.json"] = lambda h, code=code: h.refuse(404, code)  # type: ignore[misc]
        with pytest.raises(BadInput, match=says):
            hub_of(server).read("Qwen/Qwen3-8C")


@pytest.mark.parametrize(
    ("status", "says"), [(429, "slow down"), (500, "answered 500"), (503, "answered 503"), (418, "answered 418")]
)
def test_a_hub_in_trouble_is_the_worlds_failure(server: Server, status: int, says: str) -> None:
    """Exit 3, with what would help."""
    server.acts["config.json"] = lambda h: h.refuse(status, "")
    with pytest.raises(WorldFailed, match=f"{says}.*local folder"):
        hub_of(server).read("org/name")


def test_one_broken_shard_fails_the_whole(server: Server) -> None:
    """Half a model is not a model; a shard that is merely absent leaves the size of the index."""
    names = [f"s{n}.safetensors" for n in range(20)]
    index = {"weight_map": {name: name for name in names}, "metadata": {"total_size": 777}}
    server.files |= {name: shard(**{name: 5}) for name in names} | {"model.safetensors.index.json": json.dumps(index).encode()}
    assert hub_of(server).read("org/name").total_bytes == 100
    server.files["s7.safetensors"] = b"broken"
    with pytest.raises(BadInput, match=r"s7\.safetensors"):
        hub_of(server).read("org/name")
    del server.files["s7.safetensors"]
    found = hub_of(server).read("org/name")
    assert (found.tensors, found.total_bytes) == (None, 777)
    assert "1 of 20 shards" in found.notes[0]


def test_a_hub_that_is_not_there_says_what_would_help(server: Server) -> None:
    """Connection refused is exit 3, with a local folder and the nearest bundled names."""
    hub = hub_of(server)
    server.shutdown()
    server.server_close()
    with pytest.raises(WorldFailed, match=r"cannot be reached \(Connection refused\); give a local folder.*Qwen/Qwen3-8B"):
        hub.read("Qwen/Qwen3-8C")


def test_answers_are_kept_and_used_without_the_network(server: Server, tmp_path: Path) -> None:
    """The second time nobody is asked; nothing secret is in the file; a damaged file is fetched anew."""
    server.files["model.safetensors"] = shard(a=3)
    hub = hub_of(server, token=TOKEN, cache=tmp_path)
    first = hub.read("org/name", "v1/x")
    asked = len(server.seen)
    again = hub.read("org/name", "v1/x")
    assert len(server.seen) == asked
    assert replace(again, source=first.source) == first
    assert "kept in" in again.source
    path = cache_file(tmp_path, "org/name", "v1/x")
    assert path == tmp_path / "org--name" / "v1%2Fx.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert TOKEN not in path.read_text()
    for damage in ("", "{", '{"schema": 1}', "[" * 100_000, path.read_text().replace('"tensors":[', '"tensors":[1,')):
        path.write_text(damage)
        assert hub.read("org/name", "v1/x").tensors == first.tensors
    assert len(server.seen) > asked


def test_a_cache_that_cannot_be_written_costs_a_note(server: Server, tmp_path: Path) -> None:
    """A full or read-only disk does not stop a plan."""
    (tmp_path / "file").write_text("")
    found = hub_of(server, cache=tmp_path / "file").read("org/name")
    assert found.config == CONFIG
    assert "could not be kept" in found.notes[-1]


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_means_that_nobody_is_asked(server: Server, tmp_path: Path, variable: str) -> None:
    """Exit 3 in one line; what was kept before is still used."""
    environment = {"HF_ENDPOINT": server.url, "XDG_CACHE_HOME": str(tmp_path)}
    hub = Hub.from_environment(environment | {variable: "1"}, home=tmp_path)
    with pytest.raises(WorldFailed, match="OFFLINE is set"):
        hub.read("org/name")
    assert server.seen == []
    Hub.from_environment(environment, home=tmp_path).read("org/name")
    assert hub.read("org/name").config == CONFIG


def test_the_environment_of_hugging_faces_tools_is_honoured(server: Server, tmp_path: Path) -> None:
    """Token by variable before token file; the public hub unless HF_ENDPOINT says otherwise."""
    assert Hub.from_environment({}, home=tmp_path).endpoint == ENDPOINT
    assert ENDPOINT.startswith("https://")
    (tmp_path / "token").write_text("from_file\n")
    endpoint = {"HF_ENDPOINT": server.url + "/", "HF_HOME": str(tmp_path)}
    for number, (extra, token) in enumerate(
        [
            ({}, "from_file"),
            ({"HUGGING_FACE_HUB_TOKEN": "old"}, "old"),
            ({"HUGGING_FACE_HUB_TOKEN": "old", "HF_TOKEN": "new"}, "new"),
        ]
    ):
        server.seen.clear()
        Hub.from_environment(endpoint | extra, home=tmp_path).read("org/name", f"r{number}")
        assert server.seen[0][:2] == (f"/org/name/resolve/r{number}/config.json", f"Bearer {token}")


@pytest.mark.parametrize(
    "endpoint", ["hub.test", "ftp://hub.test", "https://user:pw@hub.test", "https://", "https://a b", "file:///x"]
)
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    """HF_ENDPOINT is http or https, a host, and no password."""
    with pytest.raises(BadInput, match="HF_ENDPOINT"):
        Hub(endpoint)


def test_a_token_that_would_break_the_request_is_refused() -> None:
    """A line break in HF_TOKEN would be a header of its own."""
    with pytest.raises(BadInput, match="HF_TOKEN") as caught:
        Hub(token="abc\r\nX-Evil: 1")
    assert "Evil" not in str(caught.value)


def test_read_model_asks_the_hub_last(server: Server, tmp_path: Path) -> None:
    """A bundled id is answered offline; with a revision of its own, or unknown, the hub is asked."""
    hub, env = hub_of(server), {"HOME": str(tmp_path)}
    assert read_model("Qwen/Qwen3-8B", hub=lambda: hub, environment=env).source.startswith("bundled")
    assert server.seen == []
    assert read_model("Qwen/Qwen3-8B", hub=lambda: hub, revision="refs/pr/1", environment=env).config == CONFIG
    assert server.seen[0][0] == "/Qwen/Qwen3-8B/resolve/refs%2Fpr%2F1/config.json"
    assert read_model("org/unknown", hub=lambda: hub, environment=env).config == CONFIG


def test_a_bundled_model_is_known_also_where_the_hub_does_not_answer_for_its_revision(server: Server, tmp_path: Path) -> None:
    """The catalogue's shape with a note is better than none; a model nobody knows stays unknown."""
    offline, env = Hub(server.url, is_offline=True), {"HOME": str(tmp_path)}
    found = read_model("Qwen/Qwen3-8B", hub=lambda: offline, revision="v2", environment=env)
    assert found.source.startswith("bundled")
    assert "no revisions" in found.notes[0]
    with pytest.raises(WorldFailed):
        read_model("org/unknown", hub=lambda: offline, revision="v2", environment=env)


def test_no_token_goes_over_http_to_another_machine(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen by a proxy, as anybody on the way would see it."""
    monkeypatch.setenv("http_proxy", server.url)
    server.acts["config.json"] = lambda h: h.refuse(404, "")
    with pytest.raises(BadInput, match=r"not on hub\.test"):
        Hub("http://hub.test", token="hf_secret").read("org/name")
    assert [token for _, token, _ in server.seen] == [None]


def _slow(handler: Handler) -> None:
    time.sleep(0.6)
    handler.serve(b"{}")


def _trickle(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def _headers_without_end(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    for _ in range(40):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def _not_http(handler: Handler) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n")


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (_slow, TimedOut, "did not answer within 0.2 s"),
        (_trickle, TimedOut, "did not answer within 0.8 s"),
        (_headers_without_end, TimedOut, "did not answer within 0.8 s"),
        (_not_http, WorldFailed, "not HTTP"),
        (lambda h: h.answer(200, b"{", Content_Length="50"), WorldFailed, "truncated answer"),
        (lambda h: h.answer(200, b"\x1f\x8b", Content_Encoding="gzip"), WorldFailed, "compressed"),
        (lambda h: h.answer(200, b"", Content_Length=str(10**10)), TooLarge, "more than"),
        (lambda h: h.answer(302, b"", Location="file:///etc/passwd"), WorldFailed, "not https"),
        (lambda h: h.answer(302, b"", Location="ftp://127.0.0.1/x"), WorldFailed, "not https"),
        (lambda h: h.answer(302, b"", Location=h.path), WorldFailed, "redirects more than 5 times"),
        (lambda h: h.answer(302, b""), WorldFailed, "answered 302"),
        (lambda h: h.serve(b"<html>"), BadInput, "not JSON"),
    ],
)
def test_a_misbehaving_hub_is_one_line(
    server: Server, act: Callable[[Handler], None], error: type[Exception], says: str
) -> None:
    """Slow, cut off, lying, compressed, redirecting in circles: each ends in time and says what happened."""
    server.acts["config.json"] = act
    with pytest.raises(error) as caught:
        hub_of(server, timeout_s=0.2).read("org/name")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_body_without_a_length_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not say how much it sends is not heard out for ever."""
    monkeypatch.setattr("plimsoll.models.hub.CONFIG_MAX_BYTES", 1000)

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b" " * 100_000)

    server.acts["config.json"] = endless
    with pytest.raises(TooLarge, match="more than 1,000 bytes"):
        hub_of(server).read("org/name")


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        (lambda h: h.answer(206, b"\x02" + bytes(7), Content_Range="bytes 5-12/100"), WorldFailed, "another part"),
        (lambda h: h.answer(206, b"\x02" + bytes(7), Content_Range="bytes 0-99/100"), WorldFailed, "another part"),
        (lambda h: h.answer(206, b"\x02" + bytes(7), Content_Range="nonsense"), WorldFailed, "another part"),
        (lambda h: h.answer(206, b"\x02", Content_Range="bytes 0-7/100", Content_Length="8"), WorldFailed, "truncated answer"),
        (lambda h: h.answer(206, b"\xff" * 8, Content_Range="bytes 0-7/100"), BadInput, "not a safetensors file"),
        (lambda h: h.answer(206, b"\x40" + bytes(7), Content_Range="bytes 0-7/20"), BadInput, "cut short"),
        (lambda h: h.refuse(416, ""), WorldFailed, "answered 416"),
    ],
)
def test_a_lie_about_a_part_is_found_out(
    server: Server, act: Callable[[Handler], None], error: type[Exception], says: str
) -> None:
    """Another range than asked for, fewer bytes, a header longer than the file."""
    server.acts["model.safetensors"] = act
    with pytest.raises(error) as caught:
        hub_of(server).read("org/name")
    assert says in str(caught.value)
