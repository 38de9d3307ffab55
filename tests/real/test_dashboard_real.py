"""Guard's page in a real Chromium, on a real guard that watches real stand-ins: both views, live, and every button."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.page_world import ACTS, READS, World, world
from tests.fakes import eventually
from tests.real.page_browser import Tab, tab
from tests.real.small_farm import ran

BUTTONS = ("Pause", "Drain", "Compact", "Restart")


@pytest.fixture(scope="module")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two stand-ins with gate and probe, and a guard that may act on them."""
    with world(tmp_path_factory.mktemp("page")) as found:
        found.engine("a")
        found.engine("b")
        found.wait_ready()
        found.guard("--act")
        yield found


def test_both_views_show_what_guard_knows(browser: Any, acting: World) -> None:
    """The fleet has a line for each; an engine its ledger, which adds up to the card, charts, blocks and ladder."""
    acting.load("a", 8)
    with tab(browser, acting.url) as one:
        one.open(READS)
        assert sorted(one.texts(".fleet tbody th")) == ["a", "b"]
        one.engine("a")
        one.until(lambda: one.texts(".tile dd")[0] != "unknown")
        bar = one.page.locator(".ledger").get_attribute("aria-label") or ""
        parts = "weights|CUDA graphs|activation|KV cache, used|KV cache, free|releasable|slack|load line".split("|")
        assert [part for part in parts if part not in bar] == [], bar
        sizes = [float(text.split()[0]) * (1 if "GiB" in text else 1 / 1024) for text in one.texts(".parts td:nth-child(2)")]
        assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.06)
        assert "blocks of 16 tokens are in use" in one.texts(".s-blocks .chart-says")[0]
        assert len(one.texts(".ladder li")) == 4
        assert len(one.texts(".s-conditions tbody tr")) == 21
        assert one.page.locator(".ch-kv .seen").get_attribute("d")
        tiles = one.page.locator(".engine > .tiles .tile")
        assert "in flight at the gate" in tiles.locator("dt").all_inner_texts()
        latencies = [
            tiles.filter(has_text=words).locator("dd").first for words in ("to first token", "per token", "tokens a second")
        ]
        one.until(lambda: all(said.inner_text() not in ("unknown", "0") for said in latencies), 90)
        assert [said.inner_text().rpartition(" ")[2] for said in latencies[:2]] == ["ms", "ms"]
        one.is_clean()


def test_a_change_is_on_the_page_within_two_seconds(browser: Any, acting: World, record_property: Any) -> None:
    """From the moment the engine's own page shows it: five times that requests come, and five times that they have gone."""
    took = []
    with tab(browser, acting.url) as one:
        one.open(READS)
        row = one.page.locator(".fleet tbody tr").filter(has=one.page.get_by_role("link", name="b", exact=True))
        cell = row.locator(".c-running")

        def shows(is_busy: bool) -> bool:
            return (cell.inner_text() not in ("0", "unknown")) is is_busy

        for _ in range(5):
            hang_up = acting.begin("b")
            for is_busy in (True, False):
                if not is_busy:
                    hang_up()
                eventually(lambda is_busy=is_busy: (acting.running("b") > 0) is is_busy)
                began = time.monotonic()
                one.until(partial(shows, is_busy))
                took.append(time.monotonic() - began)
        one.is_clean()
    record_property("figures", f"10 changes on the page after {sum(took) / 10:.2f} s in the mean, {max(took):.2f} s at most")
    assert max(took) < 2.0, took


def pressed(one: Tab, name: str) -> str:
    """Press a button, confirm it, and what the page says then."""
    one.button(name).click()
    one.page.locator("#ask-yes").click()
    one.until(lambda: one.page.locator("#ask-says").inner_text() not in ("", "asked …"))
    said = one.page.locator("#ask-says").inner_text()
    one.page.locator("#ask-no").click()
    return said


def test_without_a_token_no_button_sends_a_link_may_bring_it_and_a_wrong_one_is_told(browser: Any, acting: World) -> None:
    """Nothing is shown and nothing sent; from a link it is kept in the tab, out of the address bar; a wrong one is said."""
    before = acting.get("/v1/journal?last=1000")["entries"]
    with tab(browser, acting.url) as one:
        one.open(None)
        one.page.keyboard.press("Escape")
        one.button("Pause guard").click()
        assert "a token is required. Nothing was sent." in one.page.locator("#token-says").inner_text()
        assert one.texts(".fleet tbody tr") == []
        # And where it was forgotten while an engine was shown: its buttons are gone with it.
        one.open(ACTS)
        one.engine("a")
        one.button("Token").click()
        one.button("Forget it").click()
        assert [one.button(name).count() for name in BUTTONS] == [0, 0, 0, 0]
        assert one.posts == []
        one.is_clean()
    assert acting.get("/v1/journal?last=1000")["entries"] == before
    with tab(browser, acting.url) as one:
        one.page.goto(f"{acting.url}/#token={ACTS}")
        one.page.wait_for_selector("#link.is-live")
        assert one.page.url == f"{acting.url}/"
        one.page.reload()
        one.page.wait_for_selector("#link.is-live")
        one.is_clean()
    with tab(browser, acting.url) as one:
        one.page.goto(acting.url)
        one.page.fill("#token-field", "not-the-token")
        one.page.click("#token-form button[type=submit]")
        one.page.wait_for_selector("#link.is-refused")
        one.page.locator("#token-says").filter(has_text="rejects this token").wait_for()
        one.is_clean("401 (Unauthorized)")


def test_with_the_token_that_only_reads_every_button_is_refused(browser: Any, acting: World) -> None:
    """Each is confirmed, sent, answered 403 and said to be so; nothing is written to the journal."""
    before = acting.get("/v1/journal?last=1000")["entries"]
    with tab(browser, acting.url) as one:
        one.open(READS)
        one.engine("b")
        for name in (*BUTTONS, "Pause guard"):
            assert pressed(one, name) == "Nothing was done: this token only reads. The buttons need the token that acts.", name
        assert len(one.posts) == 5
        one.is_clean("403 (Forbidden)")
    assert acting.get("/v1/journal?last=1000")["entries"] == before


@pytest.mark.timeout(180)
def test_with_the_token_that_acts_every_button_does_what_it_says(browser: Any, acting: World) -> None:
    """Pause and resume, drain and put back, compact, restart: each on the real guard, seen in its journal and on the page.

    Declined, by the button on which the keyboard stands or by Escape, nothing is sent.
    """
    with tab(browser, acting.url) as one:
        one.open(ACTS)
        one.engine("b")
        for name in BUTTONS:
            one.button(name).click()
            assert one.page.evaluate("document.activeElement.id") == "ask-no"
            one.page.keyboard.press("Escape" if name == "Drain" else "Enter")
        assert one.posts == []
        assert pressed(one, "Pause").startswith("Accepted. b: paused")
        one.button("Resume").wait_for()
        assert pressed(one, "Restart").startswith("Blocked")
        assert pressed(one, "Resume").startswith("Accepted. b: resumed")
        assert pressed(one, "Pause guard").startswith("Accepted. all actions: paused")
        one.button("Resume guard").wait_for()
        assert pressed(one, "Resume guard").startswith("Accepted.")
        assert pressed(one, "Drain").startswith("Accepted. b: drain")
        one.button("Put back").wait_for()
        assert pressed(one, "Put back").startswith("Accepted. b: undrain")
        one.button("Drain").wait_for()
        eventually(lambda: not acting.get("/v1/actions")["actions"], 30)
        ctl = (sys.executable, "-m", "plimsoll", "guardctl", "set", "b", "max-num-seqs=2", "--for", "20s", "--at", acting.url)
        assert ran(*ctl, "--token-file", str(acting.folder / "acts.token")).returncode == 0
        eventually(lambda: [text for text in one.texts(".note") if text.startswith("max-num-seqs=2")], 30)
        assert pressed(one, "Compact").startswith("Accepted. b: compact")
        eventually(lambda: not acting.get("/v1/actions")["actions"], 30)
        assert pressed(one, "Restart").startswith("Accepted. b: restart")
        one.page.wait_for_selector(".ladder .is-doing")
        one.page.get_by_text("restart completed").first.wait_for(timeout=90_000)
        one.is_clean("409 (Conflict)")
    assert "b: restart completed" in acting.log()


@pytest.mark.timeout(180)
def test_an_action_that_waits_for_approval_is_denied_and_approved_by_its_buttons(browser: Any, tmp_path: Path) -> None:
    """The buttons come with the question; a token that only reads changes nothing, deny is kept, approve restarts it."""
    with world(tmp_path) as farm:
        farm.engine("a")
        farm.engine("b")
        farm.wait_ready()
        farm.guard("--act", text='[policy.dead]\nunexplained = "10s"\n', act='approve = ["restart"]\n')
        eventually(lambda: all(one["reach"] == "answers" for one in farm.get("/engines")["engines"]), 30)
        for name in ("a", "b"):
            farm.kill(name)
        with tab(browser, farm.url, viewport={"width": 360, "height": 740}) as one:
            one.open(READS)
            one.engine("a")
            one.button("Approve").wait_for(timeout=60_000)
            assert pressed(one, "Approve").startswith("Nothing was done")
        with tab(browser, farm.url) as one:
            one.open(ACTS)
            one.engine("a")
            one.button("Deny").wait_for(timeout=60_000)
            assert pressed(one, "Deny") == "Accepted. a: restart denied: not done"
            one.button("Deny").wait_for(state="detached")
            one.page.goto(f"{farm.url}/#/")
            one.engine("b")
            assert pressed(one, "Approve").startswith("Accepted. b: restart approved")
            one.page.get_by_text("restart completed").first.wait_for(timeout=90_000)
            one.is_clean("403 (Forbidden)")
        answers = [(one["engine"], one["step"]) for one in farm.get("/v1/journal")["entries"] if one["kind"] == "approval"]
        assert sorted(answers) == [("a", "asked"), ("a", "denied"), ("b", "approved"), ("b", "asked")]
        assert farm.get("/engines/b")["engine"]["reach"] == "answers"
        assert farm.get("/engines/a")["engine"]["reach"] == "refused"
