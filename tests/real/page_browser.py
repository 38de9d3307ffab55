"""Debian's Chromium on guard's page: what it asked, what it complained of, and what was on the page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

from tests.real.small_farm import need


class Tab:
    """One page, and all that must not happen on it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self._url = page, url
        self.console: list[str] = []
        self.away: list[str] = []
        self.posts: list[str] = []
        page.on("console", lambda said: self.console.append(f"{said.type}: {said.text}") if said.type != "log" else None)
        page.on("pageerror", lambda problem: self.console.append(f"thrown: {problem}"))
        page.on("request", self._asked)

    def _asked(self, request: Any) -> None:
        if urlsplit(request.url).netloc != urlsplit(self._url).netloc and not request.url.startswith("data:"):
            self.away.append(request.url)
        if request.method == "POST":
            self.posts.append(urlsplit(request.url).path)

    def open(self, token: str | None, path: str = "/") -> Tab:
        """The page, with this token typed in."""
        self.page.goto(self._url + path)
        if token is not None:
            self.page.fill("#token-field", token)
            self.page.click("#token-form button[type=submit]")
            self.page.wait_for_selector("#link.is-live")
        return self

    def engine(self, name: str) -> Tab:
        """Its view, from the fleet's line."""
        self.page.get_by_role("link", name=name, exact=True).click()
        self.page.wait_for_selector(".engine .tile")
        return self

    def button(self, name: str) -> Any:
        """The button that is called so."""
        return self.page.get_by_role("button", name=name, exact=True)

    def texts(self, selector: str) -> list[str]:
        """What stands in all of these."""
        return self.page.locator(selector).all_inner_texts()

    def until(self, holds: Callable[[], bool], within_s: float = 20.0) -> None:
        """Asked from outside: the page's own policy lets nobody evaluate texts in it."""
        end_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end_s, "it did not come about"
            time.sleep(0.02)

    def is_clean(self, *but: str) -> None:
        """Nothing went wrong, and nothing was asked of anybody else. `but`: what the browser itself says of a refusal."""
        assert self.away == []
        assert [said for said in self.console if not any(one in said for one in but)] == []


@contextlib.contextmanager
def browsing() -> Iterator[Any]:
    program = need("chromium", "chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def tab(browser: Any, url: str, **options: Any) -> Iterator[Tab]:
    """One in a context of its own: nothing is kept from another."""
    context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
    context.set_default_timeout(20_000)
    try:
        yield Tab(context.new_page(), url)
    finally:
        context.close()
