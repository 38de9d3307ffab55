"""An engine that the user's own commands stop and start: whatever runs it, somebody knows how to ask that.

Each command is run without a shell, in a session of its own, with a time limit, and with a small environment: PLIMSOLL_VERB
(stop, start, is-running, pids), PLIMSOLL_DEADLINE_S, and nothing that guard was given for itself. Exit code 0 means done, or
that the engine runs; 3, from is-running, that it does not, 150 that it does not because somebody stopped it, and 151 that it
ended by itself and nobody else starts it; anything else that it failed, or that nobody knows. The last line it prints is the
sentence that guard passes on.

The stop command must signal the API server alone, wait until it has ended, and leave nothing behind; the start command returns
when the engine is on its way, and sends its output to a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.doctor.read.redact_text import shown_line
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.run_command import CommandResult, run_command, small_environment

ASK_LIMIT_S = 10.0
START_LIMIT_S = 60.0
GRACE_S = 5.0  # past the deadline that the command itself was told
PATIENCE_S = 120.0  # that a stop command may take in all, however short the deadline
NOT_RUNNING = 3  # as in the convention of init scripts
BY_HAND, ENDED = 150, 151  # the first of those that the convention leaves to programs
MOST_PIDS = 4096


@dataclass(frozen=True, slots=True)
class CommandRestarterConfig(key.ConfigTable):
    """restart = {stop = [...], start = [...], is_running = [...]}."""

    stop: tuple[str, ...] = key.command("a command that stops it: SIGTERM to the server alone", example='["ctl", "stop"]')
    start: tuple[str, ...] = key.command("a command that starts it and returns", example='["ctl", "start"]')
    is_running: tuple[str, ...] = key.command(
        "whether it runs: exit code 0 yes, 3 no, 150 no: somebody stopped it, 151 no: it ended by itself",
        example='["ctl", "status"]',
    )
    pids: tuple[str, ...] = key.command("a command that prints its processes, for evidence")

    def build(self) -> CommandRestarter:
        return CommandRestarter(self.stop, self.start, self.is_running, self.pids)


class CommandRestarter:
    """One engine behind commands; those that only ask may be left out."""

    replaces = False
    ask_limit_s, start_limit_s, grace_s, patience_s = ASK_LIMIT_S, START_LIMIT_S, GRACE_S, PATIENCE_S

    def __init__(self, stop: Sequence[str], start: Sequence[str], is_running: Sequence[str], pids: Sequence[str] = ()) -> None:
        self._commands = {"stop": stop, "start": start, "is-running": is_running, "pids": pids}
        self.label = f"commands ({shown_line(stop[0])[:60]})"

    async def is_running(self) -> bool | None:
        """By its exit code: 0 it runs; 3, 150 and 151 it does not; else nobody knows."""
        code = (await self._run("is-running", self.ask_limit_s)).code
        return True if code == 0 else False if code in (NOT_RUNNING, BY_HAND, ENDED) else None

    async def last_exit(self) -> Outcome:
        """How it ended: not yet (failed), done where the command says so, else not known."""
        code = (await self._run("is-running", self.ask_limit_s)).code
        if code == ENDED:
            return done("it ended by itself, and nobody starts it")
        if code == BY_HAND:
            return done("somebody stopped it", by_hand=True)
        return failed("it has not ended") if code == 0 else unsure("whether somebody stopped it is not known")

    async def pids(self) -> tuple[int, ...]:
        """The numbers that the command prints; none without one."""
        if not self._commands["pids"]:
            return ()
        ran = await self._run("pids", self.ask_limit_s)
        words = ran.output.decode("utf-8", "replace").split()[:MOST_PIDS] if ran.code == 0 else []
        return tuple(int(word) for word in words if word.isascii() and word.isdecimal() and 1 < int(word[:12]) < 2**31)

    async def stop(self, deadline_s: float) -> Outcome:
        """Run the command, then ask whether it is true."""
        # A script that does not heed a short deadline is not broken off: half of a stop is worse than a late one.
        ran = await self._run("stop", deadline_s, max(self.grace_s, self.patience_s - deadline_s))
        if ran.code is None:
            return unsure(f"the stop command: {ran.trouble}", timed_out=True)
        if ran.code != 0:
            return failed(f"the stop command ended with {ran.code}{ran.last_words}", code=ran.code)
        is_running = await self.is_running()
        if is_running is None:
            return unsure("the stop command says that it is done, but nobody knows whether the engine runs")
        if is_running:
            return failed("the stop command says that it is done, but the engine runs")
        return done(f"stopped{ran.last_words}")

    async def start(self) -> Outcome:
        """Refused while the engine runs, or nobody knows whether it does."""
        is_running = await self.is_running()
        if is_running is not False:
            return failed("it runs already" if is_running else "nobody knows whether it runs already", running=bool(is_running))
        ran = await self._run("start", self.start_limit_s)
        if ran.code is None:
            return unsure(f"the start command: {ran.trouble}", timed_out=True)
        if ran.code != 0:
            return failed(f"the start command ended with {ran.code}{ran.last_words}", code=ran.code)
        return done(f"started{ran.last_words}")

    async def _run(self, verb: str, limit_s: float, grace_s: float = 0.0) -> CommandResult:
        environment = {**small_environment(), "PLIMSOLL_VERB": verb, "PLIMSOLL_DEADLINE_S": f"{limit_s:g}"}
        return await run_command(self._commands[verb], limit_s + grace_s, environment, only_stdout=verb == "pids")
