"""A real Prometheus and a real Alertmanager on the generated files, and a webhook that keeps what it is told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from lab.draw_dashboard import asked
from lab.engine.server import free_port
from lab.page_world import answers
from plimsoll.assets.alerts import Thresholds, groups_of
from plimsoll.assets.monitoring import alertmanager_text, prometheus_text, rules_text
from plimsoll.assets.settings import AssetSettings
from plimsoll.doctor.read.prometheus import is_prometheus
from tests.real.small_farm import need

_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Webhook:
    """Where Alertmanager sends what it has: each alert once with its status, in the order it came."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []  # receiver, alert, status
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                webhook.told += [(self.path, alert["labels"]["alertname"], alert["status"]) for alert in body["alerts"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def firing(self, receiver: str = "") -> set[str]:
        """What has been told to fire, at this place or at any."""
        return {alert for path, alert, status in self.told if status == "firing" and receiver in path}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Watching:
    """Both of them while they run."""

    def __init__(self, url: str, webhook: Webhook, began_s: float) -> None:
        self.url, self.webhook, self.began_s = url, webhook, began_s

    def query(self, expr: str) -> list[dict[str, Any]]:
        """One expression as of now."""
        return list(self._get("query", query=expr)["result"])

    def ever(self, expr: str) -> list[dict[str, Any]]:
        """The same at any moment of this run."""
        return asked(self.url, expr, self.began_s, time.time(), 2.0)

    def names(self) -> set[str]:
        return set(self._get("label/__name__/values"))

    def _get(self, path: str, **query: str) -> Any:
        with _HTTP.open(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def until(self, alert: str, within_s: float) -> float:
        """Wait until the webhook has been told of it; how long that took."""
        began_s = time.monotonic()
        while alert not in self.webhook.firing():
            assert time.monotonic() - began_s < within_s, (alert, self.webhook.told, self.query("ALERTS"))
            time.sleep(0.5)
        return time.monotonic() - began_s


@contextlib.contextmanager
def remembering(folder: Path, history: str, config: str = "scrape_configs: []\n") -> Iterator[str]:
    """A Prometheus that has this history, in the format of OpenMetrics, from before it began."""
    (folder / "history.om").write_text(history, encoding="utf-8")
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    tool, port = need("promtool", "prometheus"), free_port()
    words = [tool, "tsdb", "create-blocks-from", "openmetrics", str(folder / "history.om"), str(folder / "data")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = [
        need("prometheus", "prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.time=10y",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with _process(words, folder / "log"):
        _wait(lambda: is_prometheus(url), folder / "log")
        yield url


@contextlib.contextmanager
def watching(folder: Path, settings: AssetSettings, bounds: Thresholds, guard_token: str) -> Iterator[Watching]:
    """Prometheus and Alertmanager on what would be generated, but for a scrape every two seconds and a webhook of our own."""
    webhook, port, manager = Webhook(), free_port(), free_port()
    (folder / "guard.token").write_text(guard_token, encoding="ascii")
    texts = {
        "rules.yml": rules_text(groups_of(settings, bounds), settings.job),
        "prometheus.yml": prometheus_text(settings, f"127.0.0.1:{manager}")
        .replace('"15s"', '"2s"')
        .replace("/etc/plimsoll/guard-read.token", str(folder / "guard.token")),
        "alertmanager.yml": alertmanager_text(f"{webhook.url}/page", f"{webhook.url}/ticket"),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    programs = (
        [
            need("prometheus", "prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        [
            need("prometheus-alertmanager", "prometheus-alertmanager"), f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/alerts", f"--web.listen-address=127.0.0.1:{manager}", "--cluster.listen-address=",
        ],
    )  # fmt: skip
    with contextlib.ExitStack() as running:
        running.callback(webhook.close)
        for words in programs:
            running.enter_context(_process(words, folder / f"{Path(words[0]).name}.log"))
        url = f"http://127.0.0.1:{port}"
        _wait(lambda: is_prometheus(url), folder / "prometheus.log")
        _wait(lambda: answers(f"http://127.0.0.1:{manager}/-/ready"), folder / "prometheus-alertmanager.log")
        yield Watching(url, webhook, time.time())


@contextlib.contextmanager
def _process(words: Sequence[str], log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(list(words), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _wait(holds: Any, log: Path) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s, log.read_text(encoding="utf-8", errors="replace")[-2000:]
        time.sleep(0.25)
