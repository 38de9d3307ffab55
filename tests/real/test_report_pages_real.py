"""The pages of plan and simulate in Chromium: drawn, silent, within a phone's width, and readable by everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axe_core_python.sync_playwright import Axe

from plimsoll.cli.main import main
from tests.real.page_browser import tab

pytestmark = pytest.mark.real
SERVE = "--gpu L4 --vllm 0.32.0 {} -- vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 8192"
COMMANDS = {
    "plan": "plan " + SERVE,
    "simulate": "simulate synthetic:requests=200,rate=20,prompt=900,output=140,seed=1 --num-blocks 900 {}",
}
DRAWN = {"plan": ("svg .band", 4), "simulate": ("svg .line", 6)}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_report_is_drawn_and_everybody_can_read_it(name: str, browser: Any, tmp_path: Path) -> None:
    """Charts by the page's own script alone, no complaint, nothing asked for, no violation that axe knows, light and dark."""
    page = tmp_path / "page.html"
    assert main(COMMANDS[name].format(f"--html {page}").split()) == 0
    selector, least = DRAWN[name]
    for scheme, width in (("light", 1200), ("dark", 390)):
        with tab(browser, page.as_uri(), viewport={"width": width, "height": 900}, color_scheme=scheme) as one:
            one.page.goto(page.as_uri())
            assert one.page.locator(selector).count() >= least
            assert one.page.evaluate("document.documentElement.scrollWidth") <= width
            if name == "simulate" and width == 1200:
                one.page.locator("svg").first.hover()
                assert "cache use" in one.page.locator("#tip").inner_text()
                one.page.locator(".three svg").first.hover()
                assert " % within " in one.page.locator("#tip").inner_text()
            one.is_clean()
        with tab(browser, page.as_uri(), bypass_csp=True, color_scheme=scheme) as one:
            one.page.goto(page.as_uri())
            assert Axe().run(one.page)["violations"] == []


def test_without_javascript_the_tables_are_there(browser: Any, tmp_path: Path) -> None:
    """No chart and no blank in its place."""
    page = tmp_path / "page.html"
    assert main(COMMANDS["simulate"].format(f"--html {page}").split()) == 0
    with tab(browser, page.as_uri(), java_script_enabled=False) as one:
        one.page.goto(page.as_uri())
        assert not one.page.locator("svg").first.is_visible()
        assert one.page.locator("table").count() >= 4
