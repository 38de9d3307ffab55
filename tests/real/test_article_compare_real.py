"""Short scenes of the comparison with real processes: what must hold on any machine, however fast; and the article's alerts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.article.fleet import GUARD, SIDECAR
from lab.article.incidents import INCIDENTS
from lab.article.scene import Settings, play
from tests.real.small_farm import busy, need, ran

ROOT = Path(__file__).resolve().parents[2]
SCALE = 10.0


@pytest.mark.timeout(240)
async def test_a_full_cache_is_restarted_by_the_sidecar_and_left_alone_by_guard(
    record_property: Callable[[str, object], None],
) -> None:
    """The sidecar cuts requests off that were being served; guard does nothing, and nobody is lost or told to wait.

    Processes do not start faster in a scene that is played faster: on a busy machine it is given more time.
    """
    incident = next(one for one in INCIDENTS if one.name == "full")._replace(lasts_s=240.0 * min(4.0, busy()))
    settings = Settings(SCALE, 7, use_haproxy=False)
    (sidecar, guard) = list(await asyncio.gather(*(play(incident, watcher, settings) for watcher in (SIDECAR, GUARD))))
    for scene in (sidecar, guard):
        kept = ("asked", "lost", "told_to_wait", "restarts", "out_of_service_s", "noticed_s", "acted_s", "whole_again_s")
        record_property(scene["watcher"], {key: scene[key] for key in kept} | {"times_as_busy": round(busy(), 1)})
        assert scene["asked"] == scene["served"] + scene["lost"] > 0
    assert sidecar["peaks"]["kv"] > 0.95
    assert sum(sidecar["restarts"].values()) > 0
    assert sidecar["lost"] > 0
    assert sum(sidecar["out_of_service_s"].values()) > 0
    assert sum(guard["restarts"].values()) == 0
    assert (guard["lost"], guard["told_to_wait"], guard["acted_s"]) == (0, 0, None)
    assert guard["peaks"]["looks_with_a_full_cache"] > 0.5


def test_three_of_the_articles_alerts_ring_for_servers_that_are_well() -> None:
    """An idle night, and a full cache that serves everybody: as promtool's tests beside them say."""
    words = ("test", "rules", "lab/article/alerts_test.yml")
    done = ran(need("promtool", "prometheus"), *words, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "article.md").read_text(encoding="utf-8")
    assert f"$ {' '.join(['promtool', *words])}\n{done.stdout.rstrip()}\n```" in page
