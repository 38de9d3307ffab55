"""`plimsoll doctor --watch URL`: looks at running servers again and again, and says what changes. It touches nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from plimsoll.cli.doctor_inputs import number
from plimsoll.cli.options import Split
from plimsoll.cli.output import show
from plimsoll.doctor.metrics import MetricsVerdict, judge_pages
from plimsoll.domain.finding import Severity
from plimsoll.domain.metrics_page import Page
from plimsoll.errors import BadInput, WorldFailed
from plimsoll.report.doctor import clean, finding_json

USUAL_INTERVAL_S = 10.0


def watch(options: Split, *, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.time) -> int:
    """Look until stopped (or --looks times); 1 if anything was wrong at the last look."""
    from plimsoll.sources.inputs import is_url

    if not options.rest or not all(is_url(word) for word in options.rest):
        raise BadInput("--watch looks at running servers: give their addresses, http://HOST:PORT")
    interval = number(options, "--interval", USUAL_INTERVAL_S)
    looks = _looks(options.values.get("--looks"))
    before: dict[str, Page] = {}
    said: dict[str, tuple[str, ...]] = {}
    wrong, done, answered = False, 0, False
    try:
        while looks is None or done < looks:
            if done:
                sleep(interval)
            looked = [_look(url, options, before, said, clock) for url in options.rest]  # every one, also after a bad one
            wrong, answered = any(looked), answered or bool(before)
            done += 1
    except KeyboardInterrupt:
        pass
    if not answered and done:
        raise WorldFailed("no server answered")
    return int(wrong)


def _looks(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or not int(text[:9]) > 0 or len(text) > 9:
        raise BadInput(f"--looks {text!r} is not a whole number above 0")
    return int(text)


def _look(
    url: str, options: Split, before: dict[str, Page], said: dict[str, tuple[str, ...]], clock: Callable[[], float]
) -> bool:
    from plimsoll.sources.http_get import address
    from plimsoll.sources.metrics_pages import fetch_health, fetch_pages

    shown, timeout = address(url).shown, min(number(options, "--timeout", 10.0), 60.0)
    is_json = "--json" in options.switches
    stamp = time.strftime("%H:%M:%S", time.localtime(clock()))
    try:
        page = fetch_pages(url, samples=1, timeout_s=timeout)[0]
    except WorldFailed as error:
        before.pop(url, None)
        if said.get(url) != ("unreachable",):
            said[url] = ("unreachable",)
            show(
                json.dumps({"at": clock(), "server": shown, "error": clean(str(error))})
                if is_json
                else f"{stamp} {clean(str(error))}"
            )
        return True
    last = before.get(url)
    verdict = (
        judge_pages(last, page, shown, health=fetch_health(url, timeout_s=timeout))
        if last is not None
        else judge_pages(page, None, shown)
    )
    before[url] = page
    if is_json:
        findings = [finding_json(finding) for finding in verdict.findings]
        show(
            json.dumps({"at": clock(), "server": shown, "engines": _figures(verdict), "findings": findings}, ensure_ascii=False)
        )
    else:
        _say(stamp, shown, verdict, said, url)
    return any(finding.severity is not Severity.INFO for finding in verdict.findings)


def _figures(verdict: MetricsVerdict) -> list[dict[str, object]]:
    names = ("running", "waiting", "kv_cache_usage", "preemptions")
    return [{"engine": one.engine, **{name: one.figures.get(name) for name in names}} for one in verdict.facts.engines]


def _say(stamp: str, shown: str, verdict: MetricsVerdict, said: dict[str, tuple[str, ...]], url: str) -> None:
    """One line a look; a finding is told in full when it first appears, and when it is gone."""
    codes = tuple(str(finding.code) for finding in verdict.findings)
    figures = "; ".join(_line(one) for one in _figures(verdict)) or "no engine on the page"
    show(f"{stamp} {shown}  {figures}  {', '.join(codes) or 'nothing wrong'}")
    for finding in verdict.findings:
        if str(finding.code) not in said.get(url, ()):
            show(f"         {finding.code}: {clean(finding.because)}")
    gone: Sequence[str] = [code for code in said.get(url, ()) if code not in codes and code != "unreachable"]
    if gone:
        show(f"         over: {', '.join(gone)}")
    said[url] = codes


def _line(figures: dict[str, object]) -> str:
    kv = figures["kv_cache_usage"]
    share = f"{kv:.0%}" if isinstance(kv, float) else "?"
    name = f"engine {figures['engine']} " if figures["engine"] else ""
    return f"{name}running {_whole(figures['running'])}, waiting {_whole(figures['waiting'])}, KV {share}"


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else "?"
