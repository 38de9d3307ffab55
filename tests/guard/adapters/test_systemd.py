"""What is asked of systemctl, byte for byte, and what is made of its answers; systemd itself is not here."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from plimsoll.guard.adapters.systemd import PROPERTIES, SystemdConfig, SystemdUnit
from tests.each import cases, each

UNIT = "vllm@llama.service"
SHOW = ["--no-pager", "--no-ask-password", "show", f"--property={','.join(PROPERTIES)}", "--", UNIT]
GOOD = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "MainPID": "4711", "KillMode": "mixed",
        "NRestarts": "2", "ControlGroup": "/system.slice/vllm.service", "Result": "success",
        "ExecMainStatus": "0"}  # fmt: skip

# Writes down its words, and acts as it was told: a state that stop and start change, or one that never does.
FAKE = """#!{python} -IS
import json, os, sys, time
folder = {folder!r}
with open(folder + "/asked", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
told = json.load(open(folder + "/told"))
verb = next(word for word in sys.argv[1:] if not word.startswith("-"))
how = told["how"].get(verb, {{}})
time.sleep(how.get("takes_s", 0))
told["unit"].update(how.get("then", {{}}))
json.dump(told, open(folder + "/told", "w"))
if verb == "show":
    print("\\n".join(f"{{name}}={{value}}" for name, value in told["unit"].items()))
print(how.get("says", ""), file=sys.stderr)
sys.exit(how.get("code", 0))
"""


class Fake:
    """A systemctl that does as it is told."""

    def __init__(self, folder: Path, unit: dict[str, str], **how: dict[str, Any]) -> None:
        self._folder = folder
        (folder / "told").write_text(json.dumps({"unit": unit, "how": how}))
        self.path = folder / "systemctl"
        self.path.write_text(FAKE.format(python=sys.executable, folder=str(folder)))
        self.path.chmod(0o755)

    def unit(self, *, is_user: bool = False, **more: Any) -> SystemdUnit:
        """The unit that is asked about by it."""
        return SystemdUnit(SystemdConfig(UNIT, is_user=is_user), systemctl=str(self.path), **more)

    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in (self._folder / "asked").read_text().splitlines()]


OVER = {"then": {"ActiveState": "inactive", "SubState": "dead", "MainPID": "0"}}
UP = {"then": {"ActiveState": "active", "SubState": "running", "MainPID": "4712"}}


def test_stop_and_start_and_restarts_kept_from_the_last_answer(tmp_path: Path) -> None:
    """The unit is looked at, stopped, seen to be over, started, seen to be up; a user's own unit has another manager."""
    fake = Fake(tmp_path, GOOD, stop=OVER, start=UP)
    unit = fake.unit()
    assert asyncio.run(unit.is_running()) is True
    stopped = asyncio.run(unit.stop(10.0))
    assert stopped.is_done, stopped
    assert stopped.facts["how"] == "term"
    assert asyncio.run(unit.is_running()) is False
    assert asyncio.run(unit.stop(10.0)).facts["was_running"] is False
    assert asyncio.run(unit.start()).is_done
    assert [words for words in fake.asked() if "show" not in words] == [
        ["--no-pager", "--no-ask-password", "stop", "--", UNIT],
        ["--no-pager", "--no-ask-password", "start", "--", UNIT],
    ]
    assert fake.asked()[0] == SHOW
    for said, kept in (("2", 2), ("", None), ("many", None), ("9" * 30, None)):
        unit = Fake(tmp_path, {**GOOD, "NRestarts": said}).unit()
        assert unit.restarts_seen is None
        asyncio.run(unit.show())
        assert unit.restarts_seen == kept
    unit.restarts_seen = 5
    asyncio.run(unit.show())
    assert unit.restarts_seen == 5
    fake = Fake(tmp_path, GOOD)
    (tmp_path / "asked").unlink()
    asyncio.run(fake.unit(is_user=True).is_running())
    assert fake.asked() == [["--user", *SHOW]]


@each(("unit", "says"), cases("guard", "units that are not touched"))
def test_what_is_not_touched(tmp_path: Path, unit: dict[str, str], says: str) -> None:
    """A kill mode that would fail requests or leave workers, a unit that is not there: neither stop nor start is asked for."""
    fake = Fake(tmp_path, {**GOOD, **unit})
    for outcome in (asyncio.run(fake.unit().stop(1.0)), asyncio.run(fake.unit().start())):
        assert outcome.is_done is False
        assert says in outcome.message
    assert all("show" in words for words in fake.asked())


def test_past_the_deadline_the_whole_group_is_killed_and_refusals_are_passed_on(tmp_path: Path) -> None:
    """What is said is that it was killed, or systemctl's own last line; a running unit is not started twice."""
    fake = Fake(tmp_path, GOOD, stop={"takes_s": 60}, kill={"then": {**OVER["then"], "ActiveState": "failed"}})
    outcome = asyncio.run(fake.unit().stop(0.5))
    assert (outcome.is_done, outcome.facts["how"]) == (True, "kill")
    assert ["--no-pager", "--no-ask-password", "kill", "--signal=SIGKILL", "--", UNIT] in fake.asked()
    fake = Fake(tmp_path, GOOD, stop={"code": 4, "says": "Failed to stop: Interactive authentication required."})
    outcome = asyncio.run(fake.unit().stop(1.0))
    assert outcome.is_done is False
    assert "ended with 4: Failed to stop: Interactive authentication required." in outcome.message
    assert asyncio.run(fake.unit().start()).message == f"{UNIT} is active already"
    fake = Fake(tmp_path, {**GOOD, "ActiveState": "failed"}, start={"then": {"Result": "start-limit-hit"}})
    outcome = asyncio.run(fake.unit().start())
    assert (outcome.is_done, outcome.facts["result"]) == (False, "start-limit-hit")


@each(("unit", "is_running", "is_done", "by_hand"), cases("guard", "states of a unit"))
def test_states(tmp_path: Path, unit: dict[str, str], is_running: bool | None, is_done: bool | None, by_hand: bool) -> None:
    """A unit that is simply inactive was stopped; one that is on its way up again has not ended, and is not known to run."""
    engine = Fake(tmp_path, {**GOOD, **unit}).unit()
    assert asyncio.run(engine.is_running()) is is_running
    outcome = asyncio.run(engine.last_exit())
    assert (outcome.is_done, outcome.facts.get("by_hand", False)) == (is_done, by_hand)


def test_its_processes_and_no_systemd_at_all(tmp_path: Path) -> None:
    """The main one, then those of its control group and the groups below; or nothing is known, and nothing done."""
    group = tmp_path / "cg" / "system.slice" / "vllm.service"
    (group / "below").mkdir(parents=True)
    (group / "cgroup.procs").write_text("4711\n4713\n")
    (group / "below" / "cgroup.procs").write_text("4712\n")
    for place, pids in ((GOOD["ControlGroup"], (4711, 4712, 4713)), ("/../../etc", (4711,))):
        assert asyncio.run(Fake(tmp_path, {**GOOD, "ControlGroup": place}).unit(cgroups=tmp_path / "cg").pids()) == pids
    unit = SystemdUnit(SystemdConfig(UNIT), systemctl=str(tmp_path / "none"))
    assert asyncio.run(unit.is_running()) is None
    assert asyncio.run(unit.pids()) == ()
    assert asyncio.run(unit.stop(1.0)).is_done is False
    assert asyncio.run(unit.start()).is_done is False
