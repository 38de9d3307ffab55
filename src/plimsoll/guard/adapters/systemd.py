"""An engine that is a systemd unit: inspected, stopped and started by `systemctl`.

Only a unit with KillMode=mixed is touched. It sends SIGTERM to the main process alone, and SIGKILL to the whole control group
at the deadline. The default, control-group, sends SIGTERM to every process at once, and each request in flight fails;
process and none leave workers behind, with the card's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.run_command import CommandResult, run_command, small_environment

ASK_LIMIT_S = 10.0
START_LIMIT_S = 30.0
KILL_LIMIT_S = 15.0
LOOK_EVERY_S = 0.25
MOST_PIDS = 4096
SAFE_KILL_MODE = "mixed"
PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "MainPID", "KillMode", "NRestarts", "ControlGroup", "Result", "ExecMainStatus"
)  # fmt: skip
_UNIT = r"[A-Za-z0-9:_.\\][A-Za-z0-9:_.\\@-]{0,240}\.service"
_OVER = ("inactive", "failed")


@dataclass(frozen=True, slots=True)
class SystemdConfig(key.ConfigTable):
    """restart = {systemd = ...}."""

    unit: str = key.word(
        None, "a unit; it needs KillMode=mixed", key="systemd", example='"vllm.service"',
        pattern=_UNIT, pattern_name="the name of a service, such as vllm.service",
    )  # fmt: skip
    is_user: bool = key.switch("the unit is one of this user's own manager", key="user")

    def build(self) -> SystemdUnit:
        return SystemdUnit(self)


class SystemdUnit:
    """One unit of the system's manager, or with `is_user` of this user's own.

    Experimental: no systemd runs as PID 1 where the tests run; they check only the calls of systemctl.
    """

    replaces = False

    def __init__(self, config: SystemdConfig, *, systemctl: str = "systemctl", cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._unit, self._cgroups = config.unit, cgroups
        self._base = [systemctl, *(["--user"] if config.is_user else []), "--no-pager", "--no-ask-password"]
        self.label = f"the systemd unit {config.unit}"
        self.restarts_seen: int | None = None  # how often systemd had started it again, when it was last asked

    async def show(self) -> Mapping[str, str] | None:
        """The unit's properties as systemd prints them; None where they cannot be had."""
        ran = await self._ask(["show", f"--property={','.join(PROPERTIES)}"], ASK_LIMIT_S, only_stdout=True)
        if ran.code != 0:
            return None
        pairs = (line.partition("=") for line in ran.output.decode("utf-8", "replace").splitlines())
        properties = {name: value.strip() for name, given, value in pairs if given and name in PROPERTIES}
        count = properties.get("NRestarts", "")
        self.restarts_seen = int(count) if re.fullmatch(r"[0-9]{1,12}", count) else self.restarts_seen
        return properties if properties.get("ActiveState") else None

    async def is_running(self) -> bool | None:
        """True if it has processes; None where unknown, or while systemd is about to start it again."""
        properties = await self.show()
        if properties is None or properties.get("SubState") == "auto-restart":
            return None
        return properties["ActiveState"] not in _OVER

    async def last_exit(self) -> Outcome:
        """Returns how it ended: failed if it has not, else done, with `by_hand` where systemd reports a clean end."""
        properties = await self.show()
        if properties is None:
            return unsure(f"systemd says nothing of {self._unit}")
        if properties["ActiveState"] == "failed":
            return done("its unit has failed", **_facts(properties))
        if properties["ActiveState"] == "inactive":
            return done("somebody stopped its unit", by_hand=True, inferred=True, **_facts(properties))
        return failed("it has not ended")

    async def pids(self) -> tuple[int, ...]:
        """Returns the main process's pid first, then those of the others in its control group."""
        properties = await self.show()
        if properties is None:
            return ()
        main = int(properties["MainPID"]) if properties.get("MainPID", "").isdecimal() else 0
        group, others = properties.get("ControlGroup", ""), set[int]()
        if group.startswith("/") and ".." not in group.split("/"):
            for base in (self._cgroups, self._cgroups / "unified", self._cgroups / "systemd"):
                with contextlib.suppress(OSError):
                    for file in (base / group.lstrip("/")).rglob("cgroup.procs"):
                        others |= {int(line) for line in file.read_text(encoding="ascii").split() if line.isdecimal()}
        return tuple(dict.fromkeys(pid for pid in (main, *sorted(others)[:MOST_PIDS]) if pid > 1))

    async def stop(self, deadline_s: float) -> Outcome:
        """Runs `systemctl stop`; past the deadline sends SIGKILL to the whole control group, which may take 15 s more."""
        properties = await self._mixed()
        if isinstance(properties, Outcome):
            return properties
        if properties["ActiveState"] in _OVER:
            return done(f"{self._unit} was not running", was_running=False)
        ran = await self._ask(["stop"], deadline_s)
        how = "term"
        if ran.code is None:
            how = "kill"
            await self._ask(["kill", "--signal=SIGKILL"], ASK_LIMIT_S)
        elif ran.code != 0:
            return failed(f"systemctl stop ended with {ran.code}{ran.last_words}")
        end = time.monotonic() + KILL_LIMIT_S
        while True:
            now = await self.show()
            if now is not None and now["ActiveState"] in _OVER:
                says = f"{self._unit} has ended" if how == "term" else f"{self._unit} did not end in time and was killed"
                return done(says, how=how, was_running=True, **_facts(now))
            if time.monotonic() >= end:
                state = now["ActiveState"] if now else "not known"
                return unsure(f"{self._unit} was stopped, but its state is {state}", how=how)
            await asyncio.sleep(LOOK_EVERY_S)

    async def start(self) -> Outcome:
        """Runs `systemctl start`; a unit that is still starting when that takes long counts as started."""
        properties = await self._mixed()
        if isinstance(properties, Outcome):
            return properties
        if properties["ActiveState"] not in _OVER and properties.get("SubState") != "auto-restart":
            return failed(f"{self._unit} is {properties['ActiveState']} already")
        ran = await self._ask(["start"], START_LIMIT_S)
        if ran.code not in (0, None):
            return failed(f"systemctl start ended with {ran.code}{ran.last_words}")
        now = await self.show()
        if now is None or (ran.code is None and now["ActiveState"] not in ("active", "activating")):
            return unsure(f"whether {self._unit} was started is not known ({ran.trouble or 'systemd does not answer'})")
        if now["ActiveState"] in _OVER:
            return failed(f"{self._unit} is {now['ActiveState']} again at once", **_facts(now))
        return done(f"{self._unit} is {now['ActiveState']}")

    async def _mixed(self) -> Mapping[str, str] | Outcome:
        """Returns the properties of a unit that guard may stop or start; else an outcome that says why it may not."""
        properties = await self.show()
        if properties is None:
            return failed(f"systemd says nothing of {self._unit}")
        state, mode = (shown_line(properties.get(name, "")) for name in ("LoadState", "KillMode"))
        if state not in ("loaded", ""):
            return failed(f"systemd has no such unit ({state[:40]})")
        if mode != SAFE_KILL_MODE:
            return failed(
                f"its KillMode is {mode[:40] or 'unknown'}: only mixed lets requests in flight end and leaves nothing behind"
            )
        return properties

    async def _ask(self, words: Sequence[str], limit_s: float, *, only_stdout: bool = False) -> CommandResult:
        # "--" so that no name is ever an option; a unit's name cannot begin with a dash anyway.
        argv = [*self._base, *words, "--", self._unit]
        return await run_command(argv, limit_s, small_environment(), only_stdout=only_stdout)


def _facts(properties: Mapping[str, str]) -> dict[str, str | float | bool]:
    """Returns its exit code and systemd's result, as facts."""
    code, result = properties.get("ExecMainStatus", ""), shown_line(properties.get("Result", ""))[:40]
    ended: dict[str, str | float | bool] = {"exit_code": int(code)} if re.fullmatch(r"[0-9]{1,3}", code) else {}
    return ended | ({"result": result} if result else {})
