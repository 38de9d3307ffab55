"""The picture of a dashboard holds every panel of its file, and says of those without data that they have none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

from lab.draw_dashboard import drawing
from plimsoll.assets.monitoring import monitoring_files
from tests.assets.watched import PLANNED

SPAN = (1000.0, 1300.0)


class _Prometheus(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Two buckets or one level line for every expression but those of torch, which it does not know."""
        asked = parse_qs(urlsplit(self.path).query)["query"][0]
        values = [[at, "1"] for at in range(1000, 1300, 10)]
        labels = [{"le": "0.5"}, {"le": "+Inf"}] if "_bucket" in asked else [{"instance": "a<b"}]
        found = [] if "torch" in asked else [{"metric": one, "values": values} for one in labels]
        body = json.dumps({"data": {"result": found}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def prometheus() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Prometheus)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_every_panel_is_in_the_picture() -> None:
    """Titles all, marks where there is data, a word where there is none; well-formed whatever a label holds."""
    page = json.loads(monitoring_files(PLANNED)["monitoring/dashboards/plimsoll-engine.json"])
    with prometheus() as url:
        picture = drawing(url, page, SPAN)
    words = [element.text for element in ElementTree.fromstring(picture).iter() if element.text]
    assert {panel["title"] for panel in page["panels"]} <= set(words)
    assert words.count("no data in this run") == sum(
        all("torch" in target["expr"] for target in panel.get("targets", [{"expr": ""}])) for panel in page["panels"]
    )
    assert "<polyline" in picture
    assert "fill-opacity" in picture
