"""Why a unit needs KillMode=mixed: SIGTERM to every process fails what is in flight, to the main one alone it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lab.engine.clients import Told, complete, is_finished
from lab.engine.server import EngineServer
from lab.guard.farm import TOKEN
from lab.guard.unit import SOURCE
from lab.guard.vllm_unit import Unit, read_unit, stop, unit_on
from tests.real.conftest import StartEngine

PAGE = Path(__file__).parents[2] / "docs" / "guard-acts.md"
REQUESTS = 4
LONG = 1200


async def _stop_amid(server: EngineServer, unit: Unit) -> tuple[list[Told], int]:
    asked = [asyncio.create_task(complete(server.port, LONG, stream=number % 2 == 0)) for number in range(REQUESTS)]
    await asyncio.sleep(1.0)
    count = await stop(unit, server)
    return await asyncio.gather(*asked), count


@pytest.mark.soak  # minutes on two cores
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("without", "kept"), [("", REQUESTS), ("KillMode=mixed\n", 0), ("--shutdown-timeout 60 ", 0)])
def test_a_stop_by_the_unit_that_we_show_fails_no_request(start_engine: StartEngine, without: str, kept: int) -> None:
    """Each request in flight survives it; none does without KillMode=mixed, none without --shutdown-timeout."""
    text = unit_on(PAGE.read_text(encoding="utf-8"), "vllm-a.service")
    assert without in text
    unit = read_unit(text.replace(without, ""))
    server = start_engine(*unit.flags, env={"PYTHONPATH": SOURCE, "PLIMSOLL_TOKEN": TOKEN})
    told, count = asyncio.run(_stop_amid(server, unit))
    whole = sum(is_finished(one) for one in told)
    print(
        f"{unit}: {count} processes signalled, {whole} of {len(told)} requests whole; statuses {[one.status for one in told]}"
    )
    assert whole == kept, [one.body[-200:] for one in told]
    server.wait_exit()
