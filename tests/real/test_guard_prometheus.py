"""Guard with a real Prometheus that remembers: growth that took hours is found by a guard that has just begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.guard.daemon.guards import guarding
from tests.real.watching import remembering

GIB = 1 << 30
MIB = 1 << 20
HOURS = 10.0
NOW_S = int(time.time())
BEGAN_S = NOW_S - int(HOURS * 3600)
LABELS = 'engine="0",worker="0"'


def held(at: float) -> float:
    """What the leaking worker holds: 120 MiB more every hour, and some noise."""
    return 40 * GIB + 120 * MIB * (at - BEGAN_S) / 3600 + (int(at) % 7) * MIB


def level(at: float) -> float:
    """What a healthy one holds."""
    return 40 * GIB + (int(at) % 7) * MIB


def page(figure: float) -> bytes:
    """A page of metrics with a probe's words on it, of a process that has run all the time."""
    return "\n".join(
        [
            "# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {BEGAN_S - 3600}",
            "# TYPE process_resident_memory_bytes gauge", "process_resident_memory_bytes 7e8",
            "# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0",model_name="m"} 8',
            "# TYPE vllm:num_requests_waiting gauge", 'vllm:num_requests_waiting{engine="0",model_name="m"} 0',
            *(f"{name}{{{LABELS}}} {value:.0f}" for name, value in (
                ("plimsoll_figures_age_seconds", 1), ("plimsoll_torch_allocated_bytes", figure - GIB),
                ("plimsoll_torch_unreleasable_bytes", GIB), ("plimsoll_torch_reserved_bytes", figure),
                ("plimsoll_torch_releasable_bytes", 0), ("plimsoll_device_free_bytes", 3 * GIB),
                ("plimsoll_device_total_bytes", 80 * GIB), ("plimsoll_worker_resident_bytes", 3 * GIB),
            )),
            "",
        ]
    ).encode()  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """The page with what is held now."""
        figure = level if self.server.is_level else held  # type: ignore[attr-defined]
        known = {"/metrics": page(figure(time.time())), "/health": b""}
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(known.get(self.path, b""))))
        self.end_headers()
        self.wfile.write(known.get(self.path, b""))

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def engine(*, is_level: bool) -> Iterator[str]:
    """Where a server of such pages listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.is_level = is_level  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def _history(names: dict[str, bool]) -> str:
    """Ten hours, a point a minute, of the engines that are called so there: whether they stay level."""
    lines: dict[str, list[str]] = {}
    for instance, is_level in names.items():
        own = f'{{engine="0",instance="{instance}",job="vllm",worker="0"}}'
        bare = f'{{instance="{instance}",job="vllm"}}'
        for at in range(BEGAN_S, NOW_S, 60):
            figure = (level if is_level else held)(at)
            for name, labels, value in (
                ("plimsoll_torch_allocated_bytes", own, figure - GIB), ("plimsoll_torch_unreleasable_bytes", own, GIB),
                ("plimsoll_worker_resident_bytes", own, 3 * GIB), ("process_start_time_seconds", bare, BEGAN_S - 3600),
            ):  # fmt: skip
                lines.setdefault(name, []).append(f"{name}{labels} {value:.0f} {at}")
    return "\n".join([line for name, rows in lines.items() for line in (f"# TYPE {name} gauge", *rows)] + ["# EOF", ""])


@pytest.mark.timeout(180)
def test_growth_is_found_across_guards_own_restart(tmp_path: Path) -> None:
    """Who grew for ten hours is told of within the first looks, who stayed level is not, and of an unknown one it is said."""
    with (
        engine(is_level=False) as grows,
        engine(is_level=True) as stays,
        engine(is_level=True) as other,
        remembering(tmp_path, _history({grows: False, "called-otherwise": True})) as url,
    ):
        rows = (("grows", grows, ""), ("stays", stays, "instance = 'called-otherwise'\n"), ("other", other, ""))
        text = f"[api]\nlisten = '127.0.0.1:0'\n[prometheus]\nurl = '{url}'\nlabels = {{job = 'vllm'}}\n" + "".join(
            f"[[engine]]\nurl = 'http://{where}'\nname = '{name}'\n{more}" for name, where, more in rows
        )
        (tmp_path / "plimsoll.toml").write_text(text, encoding="utf-8")
        with guarding(tmp_path, "--config", str(tmp_path / "plimsoll.toml")) as guard:
            line = guard.hears("gpu.growth", 40.0)
            assert "grows: " in line
            assert "an hour" in line
            assert "no series of an engine with these labels" in guard.complains("growth of other")
            found = {row["engine"]: row["status"] for row in guard.json("/conditions?kind=growth")["conditions"]}
            forecast = guard.json("/engines/grows")["engine"]["forecasts"]["device"]
            assert guard.stop() == 0
    assert found == {"grows": "true", "stays": "false", "other": "unknown"}, "ten hours of the same are known at once, too"
    assert forecast["unknown"] is None
    assert 15 * 3600 < forecast["likely_s"] < 40 * 3600, "3 GiB at 120 MiB an hour"
    assert len([one for one in guard.said if "gpu.growth" in one]) == 1


@pytest.mark.timeout(120)
def test_a_prometheus_that_is_not_there_costs_nothing_but_a_line(tmp_path: Path) -> None:
    """The engine is watched at once, and the trouble is said once."""
    with engine(is_level=True) as stays:
        text = (
            "[api]\nlisten = '127.0.0.1:0'\n[prometheus]\nurl = 'http://127.0.0.1:9'\n"
            f"[[engine]]\nurl = 'http://{stays}'\nname = 'stays'\n"
        )
        (tmp_path / "plimsoll.toml").write_text(text, encoding="utf-8")
        with guarding(tmp_path, "--config", str(tmp_path / "plimsoll.toml")) as guard:
            guard.hears("stays: answers", 10.0)
            assert "growth of stays is judged from guard's own looks alone" in guard.complains("prometheus http://127.0.0.1:9")
            assert guard.stop() == 0
            assert len(guard.complained) == 1
