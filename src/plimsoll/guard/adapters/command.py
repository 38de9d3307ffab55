"""An engine that the user's own commands stop and start, whatever supervisor runs it.

Each command is run without a shell, in a session of its own, with a time limit, and with a small environment: PLIMSOLL_VERB
(stop, start, is-running, pids), PLIMSOLL_DEADLINE_S, and nothing that guard was given for itself. Exit code 0 means done, or
that the engine runs. From is-running, 3 means that it does not, 150 that somebody stopped it, and 151 that it ended by itself
and nobody else starts it. Any other code means failed, or unknown. The last line that the command prints is the sentence that
guard passes on.

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
GRACE_S = 5.0  # past the deadline that the command was given
PATIENCE_S = 120.0  # the time that a stop command always gets, however short the deadline
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
    """One engine behind commands; the optional ones only ask."""

    replaces = False
    ask_limit_s, start_limit_s, grace_s, patience_s = ASK_LIMIT_S, START_LIMIT_S, GRACE_S, PATIENCE_S

    def __init__(self, stop: Sequence[str], start: Sequence[str], is_running: Sequence[str], pids: Sequence[str] = ()) -> None:
        self._commands = {"stop": stop, "start": start, "is-running": is_running, "pids": pids}
        self.label = f"commands ({shown_line(stop[0])[:60]})"

    async def is_running(self) -> bool | None:
        """True if the command exits with 0, False with 3, 150 or 151, None otherwise."""
        code = (await self._run("is-running", self.ask_limit_s)).code
        return True if code == 0 else False if code in (NOT_RUNNING, BY_HAND, ENDED) else None

    async def last_exit(self) -> Outcome:
        """Returns how it ended: failed if it has not, done where the command says how, else unknown."""
        code = (await self._run("is-running", self.ask_limit_s)).code
        if code == ENDED:
            return done("it ended by itself, and nobody starts it")
        if code == BY_HAND:
            return done("somebody stopped it", by_hand=True)
        return failed("it has not ended") if code == 0 else unsure("whether somebody stopped it is not known")

    async def pids(self) -> tuple[int, ...]:
        """Returns the process ids that the command prints; none without a command."""
        if not self._commands["pids"]:
            return ()
        ran = await self._run("pids", self.ask_limit_s)
        words = ran.output.decode("utf-8", "replace").split()[:MOST_PIDS] if ran.code == 0 else []
        return tuple(int(word) for word in words if word.isascii() and word.isdecimal() and 1 < int(word[:12]) < 2**31)

    async def stop(self, deadline_s: float) -> Outcome:
        """Runs the stop command, then checks that the engine has ended."""
        # A script that ignores a short deadline is not killed at once: half a stop is worse than a late one.
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
        """Runs the start command; refused while the engine runs, or may run."""
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
