"""Why a unit needs KillMode=mixed: SIGTERM to every process fails what is in flight, to the main one alone it does not."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engine.clients import complete, is_finished
from lab.guard.farm import TOKEN
from lab.guard.vllm_unit import read_unit, stop, unit_on
from plimsoll.assets.launch import WAYS, launch_files
from tests.assets.plans import MODELS, plan_of, settings_of
from tests.assets.started import started_words
from tests.real.conftest import SOURCE, StartEngine

pytestmark = pytest.mark.once
PAGE = Path(__file__).parents[2] / "docs" / "guard-acts.md"
REQUESTS = 4
LONG = 1200
Record = Callable[[str, object], None]


def _generated(folder: Path) -> str:
    """The unit that `plimsoll assets` writes, with the command that its script becomes in the place of the script."""
    files = launch_files(settings_of(plan_of("vllm", "serve", MODELS[0])), WAYS)
    words = started_words(files, folder)["systemd"]
    text = files["systemd/vllm.service"]
    assert "ExecStart=/etc/plimsoll/vllm-start.sh\n" in text
    return text.replace("ExecStart=/etc/plimsoll/vllm-start.sh", f"ExecStart=/usr/bin/{shlex.join(words)}")


async def _survivors(start_engine: StartEngine, text: str) -> tuple[int, str]:
    """How many requests in flight are whole after a stop by a unit, and what was seen. Its ExecStop is left out."""
    unit = read_unit(text)
    server = start_engine(*unit.flags, env={"PYTHONPATH": SOURCE, "PLIMSOLL_TOKEN": TOKEN})
    asked = [asyncio.create_task(complete(server.port, LONG, stream=number % 2 == 0)) for number in range(REQUESTS)]
    await asyncio.sleep(1.0)
    count = await stop(unit, server)
    told = await asyncio.gather(*asked)
    server.wait_exit()
    whole = sum(is_finished(one) for one in told)
    return whole, f"{unit}: {count} processes signalled, {whole} of {len(told)} whole, statuses {[one.status for one in told]}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("is_generated", "without", "kept"),
    [
        (True, "", REQUESTS), (True, "KillMode=mixed\n", 0),
        pytest.param(False, "", REQUESTS, marks=pytest.mark.soak),
        pytest.param(False, "--shutdown-timeout 60 ", 0, marks=pytest.mark.soak),
    ],
)  # fmt: skip
async def test_a_stop_by_our_unit_fails_no_request(
    start_engine: StartEngine, tmp_path: Path, record_property: Record, is_generated: bool, without: str, kept: int
) -> None:
    """Each request in flight survives it, whether generated or on the page; none does with systemd's default, or vLLM's."""
    text = _generated(tmp_path) if is_generated else unit_on(PAGE.read_text(encoding="utf-8"), "vllm-a.service")
    assert without in text
    whole, seen = await _survivors(start_engine, text.replace(without, ""))
    record_property("figures", seen)
    assert whole == kept, seen
