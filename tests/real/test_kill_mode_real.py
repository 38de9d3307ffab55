"""Why a unit needs KillMode=mixed: SIGTERM to every process fails what is in flight, to the main one alone it does not."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from lab.engine.clients import Told, complete, is_finished
from lab.engine.server import EngineServer
from tests.real.conftest import StartEngine

FLAGS = ("--shutdown-timeout", "40")  # the same in both: it is the signal's reach that decides
REQUESTS = 4
LONG = 1200


def control_group(server: EngineServer) -> list[int]:
    """Whom systemd signals under KillMode=control-group, its default: every process at once."""
    return [server.pid, *(child.pid for child in server.children())]


def mixed(server: EngineServer) -> list[int]:
    """Whom it signals under KillMode=mixed: the main process alone."""
    return [server.pid]


async def _signal_amid(server: EngineServer, pids: list[int]) -> list[Told]:
    asked = [asyncio.create_task(complete(server.port, LONG, stream=number % 2 == 0)) for number in range(REQUESTS)]
    await asyncio.sleep(1.0)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    return await asyncio.gather(*asked)


@pytest.mark.soak  # minutes on two cores
@pytest.mark.parametrize(("whom", "kept"), [(control_group, 0), (mixed, REQUESTS)])
def test_a_group_wide_sigterm_fails_requests_and_one_to_the_main_process_does_not(
    start_engine: StartEngine, whom: object, kept: int
) -> None:
    """With the same settings: none of the requests in flight survives the first, each of them survives the second."""
    server = start_engine(*FLAGS)
    assert callable(whom)
    pids = whom(server)
    told = asyncio.run(_signal_amid(server, pids))
    whole = sum(is_finished(one) for one in told)
    print(f"{len(pids)} processes signalled: {whole} of {len(told)} requests whole; statuses {[one.status for one in told]}")
    assert whole == kept, [one.body[-200:] for one in told]
    server.wait_exit()
