"""Short scenes of the comparison with real processes: what must hold on any machine, however fast; and the article's alerts."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.article.fleet import GUARD, SIDECAR
from lab.article.incidents import INCIDENTS, VICTIM
from lab.article.scene import Settings, play
from tests.real.small_farm import busy, need

ROOT = Path(__file__).resolve().parents[2]
SCALE = 10.0
BY_NAME = {one.name: one for one in INCIDENTS}

Record = Callable[[str, object], None]


def played(name: str, lasts_s: float, *watchers: str, record: Record) -> list[dict[str, Any]]:
    """The same incident under each of these watchers, side by side.

    Processes do not start faster in a scene that is played faster: on a busy machine it is given more time.
    """
    incident = BY_NAME[name]._replace(lasts_s=lasts_s * min(4.0, busy()))
    settings = Settings(SCALE, 7, use_haproxy=False)

    async def main() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(play(incident, watcher, settings) for watcher in watchers)))

    scenes = asyncio.run(main())
    for scene in scenes:
        kept = ("asked", "lost", "told_to_wait", "restarts", "out_of_service_s", "noticed_s", "acted_s", "whole_again_s")
        record(scene["watcher"], {key: scene[key] for key in kept} | {"times_as_busy": round(busy(), 1)})
        assert scene["asked"] == scene["served"] + scene["lost"] > 0
    return scenes


@pytest.mark.timeout(240)
def test_a_full_cache_that_works_well_is_restarted_by_the_sidecar_and_left_alone_by_guard(record_property: Record) -> None:
    """The sidecar cuts requests off that were being served; guard does nothing, and nobody is lost or told to wait."""
    sidecar, guard = played("full", 240.0, SIDECAR, GUARD, record=record_property)
    assert sidecar["peaks"]["kv"] > 0.95
    assert sum(sidecar["restarts"].values()) > 0
    assert sidecar["lost"] > 0
    assert sum(sidecar["out_of_service_s"].values()) > 0
    assert sum(guard["restarts"].values()) == 0
    assert (guard["lost"], guard["told_to_wait"], guard["acted_s"]) == (0, 0, None)
    assert guard["peaks"]["looks_with_a_full_cache"] > 0.5


@pytest.mark.soak  # on the real engine: tests/real/test_guard_acts_real.py
@pytest.mark.timeout(240)
def test_an_engine_that_died_is_brought_back_by_guard(record_property: Record) -> None:
    """Once, and nothing is lost after it is back. (That the sidecar never does is in tests/lab/test_article.py.)"""
    (guard,) = played("death", 250.0, GUARD, record=record_property)
    assert guard["restarts"] == {"a": 0, "b": 0, VICTIM: 1}
    assert guard["whole_again_s"] is not None
    assert [at_s for at_s in guard["lost_at_s"] if at_s > guard["whole_again_s"]] == []
    assert guard["out_of_service_s"]["a"] == guard["out_of_service_s"]["b"] == 0.0


def test_three_of_the_articles_alerts_ring_for_servers_that_are_well() -> None:
    """An idle night, and a full cache that serves everybody: as promtool's tests beside them say."""
    words = [need("promtool", "prometheus"), "test", "rules", "lab/article/alerts_test.yml"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "article.md").read_text(encoding="utf-8")
    assert f"$ {' '.join(['promtool', *words[1:]])}\n{done.stdout.rstrip()}\n```" in page
