"""A real Prometheus and a real Alertmanager on the generated files, and a webhook that keeps what it is told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.draw_dashboard import asked
from lab.engine.server import free_port
from lab.page_world import answers
from plimsoll.assets.alerts import groups_of
from plimsoll.assets.monitoring import alertmanager_text, prometheus_text, rules_text
from plimsoll.assets.settings import AssetSettings
from plimsoll.doctor.read.prometheus import is_prometheus
from tests.net.page_server import Server, receiving
from tests.real.small_farm import need, ran

_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Watching:
    """Both of them while they run, and the webhook that Alertmanager tells what it has."""

    def __init__(self, url: str, webhook: Server, began_s: float) -> None:
        self.url, self.webhook, self.began_s = url, webhook, began_s

    def firing(self, receiver: str = "") -> set[str]:
        """What has been told to fire, at this place or at any."""
        told = [(path, alert) for path, _, body in self.webhook.got for alert in body["alerts"]]
        return {alert["labels"]["alertname"] for path, alert in told if alert["status"] == "firing" and receiver in path}

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
        while alert not in self.firing():
            assert time.monotonic() - began_s < within_s, (alert, self.webhook.got, self.query("ALERTS"))
            time.sleep(0.5)
        return time.monotonic() - began_s


@contextlib.contextmanager
def remembering(folder: Path, history: str, config: str = "scrape_configs: []\n") -> Iterator[str]:
    """A Prometheus that has this history, in the format of OpenMetrics, from before it began."""
    (folder / "history.om").write_text(history, encoding="utf-8")
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    words = (need("promtool", "prometheus"), "tsdb", "create-blocks-from", "openmetrics")
    done = ran(*words, str(folder / "history.om"), str(folder / "data"))
    assert done.returncode == 0, done.stderr
    with prometheus_in(folder, "--storage.tsdb.retention.time=10y") as url:
        yield url


@contextlib.contextmanager
def prometheus_in(folder: Path, *more: str) -> Iterator[str]:
    """Prometheus with the configuration and the data of this folder; its address."""
    port, log = free_port(), folder / "prometheus.log"
    paths = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with process_of([need("prometheus", "prometheus"), *paths, f"--web.listen-address=127.0.0.1:{port}", *more], log):
        _wait(lambda: is_prometheus(f"http://127.0.0.1:{port}"), log)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def watching(folder: Path, settings: AssetSettings, bounds: dict[str, Any], guard_token: str) -> Iterator[Watching]:
    """Prometheus and Alertmanager on what would be generated, but for a scrape every two seconds and a webhook of our own."""
    manager = free_port()
    (folder / "guard.token").write_text(guard_token, encoding="ascii")
    texts = {
        "rules.yml": rules_text(groups_of(settings, bounds), settings.job),
        "prometheus.yml": prometheus_text(settings, f"127.0.0.1:{manager}")
        .replace('"15s"', '"2s"')
        .replace("/etc/plimsoll/guard-read.token", str(folder / "guard.token")),
    }
    words = (
        need("prometheus-alertmanager", "prometheus-alertmanager"), f"--config.file={folder}/alertmanager.yml",
        f"--storage.path={folder}/alerts", f"--web.listen-address=127.0.0.1:{manager}", "--cluster.listen-address=",
    )  # fmt: skip
    with contextlib.ExitStack() as running:
        webhook = running.enter_context(receiving())
        texts["alertmanager.yml"] = alertmanager_text(f"http://{webhook.host}/page", f"http://{webhook.host}/ticket")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        running.enter_context(process_of(words, folder / "alertmanager.log"))
        url = running.enter_context(prometheus_in(folder))
        _wait(lambda: answers(f"http://127.0.0.1:{manager}/-/ready"), folder / "alertmanager.log")
        yield Watching(url, webhook, time.time())


@contextlib.contextmanager
def process_of(words: Sequence[str], log: Path) -> Iterator[None]:
    """A program for as long as it is wanted, and what it prints in a file."""
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
