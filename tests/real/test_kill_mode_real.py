"""Why a unit needs KillMode=mixed: SIGTERM to every process fails what is in flight, to the main one alone it does not."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.engine.clients import HttpAnswer, complete, is_finished
from lab.engine.server import EngineServer
from lab.guard.farm import TOKEN
from lab.guard.unit import SOURCE
from lab.guard.vllm_unit import Unit, read_unit, stop, unit_on
from plimsoll.assets.launch import WAYS, launch_files
from tests.assets.plans import MODELS, plan_of, settings_of
from tests.assets.started import started_words
from tests.real.conftest import StartEngine

pytestmark = pytest.mark.once
PAGE = Path(__file__).parents[2] / "docs" / "guard-acts.md"
REQUESTS = 4
LONG = 1200
Record = Callable[[str, object], None]


async def _stop_amid(server: EngineServer, unit: Unit) -> tuple[list[HttpAnswer], int]:
    asked = [asyncio.create_task(complete(server.port, LONG, stream=number % 2 == 0)) for number in range(REQUESTS)]
    await asyncio.sleep(1.0)
    count = await stop(unit, server)
    return await asyncio.gather(*asked), count


def _generated(folder: Path) -> str:
    """The unit that `plimsoll assets` writes, with the command that its script becomes in the place of the script."""
    files = launch_files(settings_of(plan_of("vllm", "serve", MODELS[0])), WAYS)
    words = started_words(files, folder)["systemd"]
    text = files["systemd/vllm.service"]
    assert "ExecStart=/etc/plimsoll/vllm-start.sh\n" in text
    return text.replace("ExecStart=/etc/plimsoll/vllm-start.sh", f"ExecStart=/usr/bin/{shlex.join(words)}")


def _survivors(start_engine: StartEngine, text: str) -> tuple[int, str]:
    """How many requests in flight are whole after a stop by a unit, and what was seen. Its ExecStop is left out."""
    unit = read_unit(text)
    server = start_engine(*unit.flags, env={"PYTHONPATH": SOURCE, "PLIMSOLL_TOKEN": TOKEN})
    told, count = asyncio.run(_stop_amid(server, unit))
    server.wait_exit()
    whole = sum(is_finished(one) for one in told)
    return whole, f"{unit}: {count} processes signalled, {whole} of {len(told)} whole, statuses {[one.status for one in told]}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("without", "kept"), [("", REQUESTS), ("KillMode=mixed\n", 0)])
def test_a_stop_by_the_generated_unit_fails_no_request(
    start_engine: StartEngine, tmp_path: Path, record_property: Record, without: str, kept: int
) -> None:
    """Each request in flight survives it, and none does where SIGTERM goes to the whole group, systemd's default."""
    text = _generated(tmp_path)
    assert without in text
    whole, seen = _survivors(start_engine, text.replace(without, ""))
    record_property("figures", seen)
    assert whole == kept, seen


@pytest.mark.soak  # minutes on two cores
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("without", "kept"), [("", REQUESTS), ("--shutdown-timeout 60 ", 0)])
def test_a_stop_by_the_unit_that_we_print_fails_no_request(start_engine: StartEngine, without: str, kept: int) -> None:
    """The documentation's own unit keeps them too, and none survives without --shutdown-timeout."""
    text = unit_on(PAGE.read_text(encoding="utf-8"), "vllm-a.service")
    assert without in text
    whole, seen = _survivors(start_engine, text.replace(without, ""))
    assert whole == kept, seen
