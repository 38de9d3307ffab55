"""Draws the pictures of guard's page for the docs: a real guard, real stand-ins under load, Debian's Chromium.

python -m lab.draw_page [FOLDER]        (docs/images, unless told otherwise)
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from lab.page_world import READS, World, world

IMAGES = Path(__file__).parents[1] / "docs" / "images"
BROWSER = "/usr/bin/chromium"
SECONDS = 45  # forecasts and conditions need to have seen something


def main(folder: Path) -> None:
    """All three of them."""
    with tempfile.TemporaryDirectory(prefix="plimsoll-page-") as name, world(Path(name)) as found:
        for engine in ("llama-a", "llama-b", "llama-c", "llama-d"):
            found.engine(engine)
        found.wait_ready()
        found.guard("--act", text='[policy.storm]\nover = "60s"\nfor = "5s"\n')
        trouble(found)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            picture(
                browser, found.url, folder / "page-engine-dark.png", {"width": 1160, "height": 1240}, "llama-b", scheme="dark"
            )
            more_for_b(found, 40)
            picture(browser, found.url, folder / "page-fleet.png", {"width": 1240, "height": 420})
            picture(browser, found.url, folder / "page-phone.png", {"width": 390, "height": 844}, "llama-b")
            browser.close()


def trouble(found: World) -> None:
    """One is busy, one gets more and more to do, one has a neighbour, one is well."""
    found.load("llama-a", 12)
    found.fault("llama-c", "neighbour", value=2 * 2**30)
    more_for_b(found, SECONDS)


def more_for_b(found: World, seconds: int) -> None:
    """Two more clients every second."""
    for _ in range(seconds):
        found.load("llama-b", 2, words=900, tokens=900)
        time.sleep(1.0)


def picture(browser: Any, url: str, path: Path, size: dict[str, int], engine: str = "", scheme: str = "light") -> None:
    """One view of it."""
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.fill("#token-field", READS)
    page.click("#token-form button[type=submit]")
    page.wait_for_selector(".fleet tbody tr")
    if engine:
        page.get_by_role("link", name=engine, exact=True).click()
        page.wait_for_selector(".ledger")
    page.wait_for_timeout(2500)
    page.screenshot(path=str(path))
    context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
