"""Any other balancer, by a command or a webhook of the user's own; docs/balancers.md has the contract.

Four verbs: take-out, put-back, is-out, connections. A command is started without a shell, in a session of its own, with a time
limit after which its whole group is killed, and with a small environment: nothing of guard's own, which holds its tokens.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from plimsoll.actuators.http_call import Lost, Server, number
from plimsoll.actuators.sentences import quoted_words
from plimsoll.domain.outcome import Outcome, done, failed, unsure
from plimsoll.errors import BadInput

DEADLINE_S = 30.0
SCHEMA = "plimsoll.hook/1"
TAKE_OUT, PUT_BACK, IS_OUT, CONNECTIONS = "take-out", "put-back", "is-out", "connections"
DEEDS = (TAKE_OUT, PUT_BACK)
NOT_YET = 3  # the exit code of a command that says "no", or "ask again"
MOST_TAIL = 16 << 10
LINGER_S = 0.5  # for the last words of a command that has ended, where something it left behind keeps its output open
MOST_CONNECTIONS = 10_000_000
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR")
_PLACES = re.compile(r"\{(verb|engine)\}")


class Told(NamedTuple):
    """What a hook answered: whether it is so (None: not known), its sentence, and a count where it gave one."""

    is_so: bool | None
    says: str
    number: int | None = None
    may_come: bool = False  # "not yet": worth asking again


class _Hook(abc.ABC):
    """What a command and a webhook have in common."""

    def __init__(self, said: str) -> None:
        self.epoch = 0  # of the lock's holder; whoever acts sets it before it does
        self.said = said

    async def take_out(self) -> Outcome:
        """No new work for this engine."""
        return _outcome(await self._tell(TAKE_OUT), "out")

    async def put_back(self) -> Outcome:
        """Work again."""
        return _outcome(await self._tell(PUT_BACK), "back in")

    async def is_out(self) -> bool | None:
        """As the balancer says now; None where the hook cannot tell."""
        return (await self._tell(IS_OUT)).is_so

    async def connections(self) -> int | None:
        """What the balancer has with this engine now; None where the hook cannot tell."""
        told = await self._tell(CONNECTIONS)
        return told.number if told.is_so else None

    @abc.abstractmethod
    async def _tell(self, verb: str) -> Told:
        """Say one verb, and hear what came of it."""


class CommandBalancer(_Hook):
    """A balancer that a command speaks to: `["/usr/local/bin/lb", "{verb}", "{engine}"]`."""

    def __init__(
        self,
        command: Sequence[str],
        engine: str,
        *,
        deadline_s: float = DEADLINE_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to the few variables that are passed on. BadInput where there is no program to start."""
        words = tuple(command)
        if not words or not words[0].startswith("/") or any("\0" in word for word in (*words, engine)):
            raise BadInput("a balancer's command is a list of words, the first of which is the whole path of a program")
        super().__init__(f"the command {words[0]}")
        self._command, self._engine = words, engine
        self._deadline_s = deadline_s
        self._environment = dict(environment or {})

    async def _tell(self, verb: str) -> Told:
        ran = await self._run(verb)
        if isinstance(ran, Told):
            return ran
        code, words = ran
        number_said = int(words) if words.isascii() and words.isdecimal() and len(words) < 9 else None
        if code == 0 and verb == CONNECTIONS:
            return Told(is_so=None if number_said is None else True, says=words, number=number_said)
        if code == 0:
            return Told(is_so=True, says=words)
        if code == NOT_YET:
            return Told(is_so=False, says=words, may_come=True)
        # A question that failed is not answered; a deed that failed was not done. Somebody else's signal came at any moment.
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Told(is_so=False if verb in DEEDS and code > 0 else None, says=f"{how}{': ' if words else ''}{words}")

    async def _run(self, verb: str) -> tuple[int, str] | Told:
        """Its exit code and its last line; a sentence where it did not run or did not end."""
        words = [_PLACES.sub(lambda found: {"verb": verb, "engine": self._engine}[found[1]], word) for word in self._command]
        own = {"PLIMSOLL_VERB": verb, "PLIMSOLL_ENGINE": self._engine, "PLIMSOLL_EPOCH": str(self.epoch)}
        few = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        ears: list[_Ear] = []
        try:
            ears.append(said := await _Ear.open())
            ears.append(complained := await _Ear.open())
            process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.DEVNULL, stdout=said.mouth, stderr=complained.mouth,
                env={**few, **self._environment, **own}, start_new_session=True, cwd="/",
            )  # fmt: skip
            said.close_mouth()
            complained.close_mouth()
            code = await self._end_of(process)
            if code is None:
                return Told(is_so=None, says=f"it did not end within {self._deadline_s:g} s and was killed")
            await asyncio.wait((said.heard, complained.heard), timeout=LINGER_S)
            return code, _last_line(said.kept) or (_last_line(complained.kept) if code else "")
        except (OSError, ValueError) as problem:
            why = getattr(problem, "strerror", None) or type(problem).__name__
            return Told(is_so=False if verb in DEEDS else None, says=f"it cannot be started ({why})")
        finally:
            for ear in ears:
                ear.close()

    async def _end_of(self, process: asyncio.subprocess.Process) -> int | None:
        """Its exit code; None where it had to be killed, with all that it started in its group."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 2.0)


class _Ear:
    """Keeps the end of what is said into a pipe of our own: it can be closed while something left behind still holds it."""

    def __init__(self, mouth: int, transport: asyncio.ReadTransport, reader: asyncio.StreamReader) -> None:
        self.mouth, self.kept = mouth, b""
        self._transport = transport
        self.heard = asyncio.ensure_future(self._hear(reader))

    @classmethod
    async def open(cls) -> _Ear:
        ear, mouth = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ear, "rb", 0)
        )
        return cls(mouth, transport, reader)

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(MOST_TAIL):
            self.kept = (self.kept + part)[-MOST_TAIL:]

    def close_mouth(self) -> None:
        if self.mouth >= 0:
            os.close(self.mouth)
            self.mouth = -1

    def close(self) -> None:
        self.close_mouth()
        self.heard.cancel()
        self._transport.close()


class WebhookBalancer(_Hook):
    """A balancer that something behind an address speaks to; `login` goes into the Authorization header and nowhere else."""

    def __init__(self, url: str, engine: str, login: str | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        """BadInput if the address or the login cannot be one."""
        if login is not None and not (login and login.isascii() and login.isprintable()):
            raise BadInput("the login of a balancer's webhook holds letters that a header cannot have")
        self._server = Server(url)
        super().__init__(f"the webhook {self._server.shown}")
        self._headers = {} if login is None else {"Authorization": login}
        self._engine, self._deadline_s = engine, deadline_s

    async def _tell(self, verb: str) -> Told:
        body = json.dumps({"schema": SCHEMA, "verb": verb, "engine": self._engine, "epoch": self.epoch}).encode()
        reply = await self._server.call("POST", "", body, self._headers, self._deadline_s)
        is_deed = verb in DEEDS
        if isinstance(reply, Lost):
            return Told(is_so=False if is_deed and not reply.was_sent else None, says=reply.why)
        found = reply.table()
        says = quoted_words(found["says"]) if isinstance(found.get("says"), str) else ""
        if reply.status != 200:
            is_refused = is_deed and 300 <= reply.status < 500
            return Told(is_so=False if is_refused else None, says=f"it answers {reply.status}{': ' if says else ''}{says}")
        is_so = found.get("done", "absent")
        if is_so is not None and not isinstance(is_so, bool):
            return Told(is_so=None, says='its answer has no "done" that is true, false or null')
        counted = number(found.get("connections"), MOST_CONNECTIONS)
        if verb == CONNECTIONS and counted is None:
            return Told(is_so=None, says=says or "it does not know")
        return Told(is_so=is_so, says=says, number=None if counted is None else int(counted), may_come=is_so is False)


class ReadinessOnly:
    """No hand on the balancer at all: it asks /plimsoll/ready by itself and stops sending when that says 503.

    A drain's first phase is the message then, so there is nothing to be told (`take_out` is done at once) and nobody to read it
    back from (`is_out` and `connections` are not known, ever). Phase one ends, by rule, when the balancer is seen to have
    stopped or a bound has passed. Only the gate can see it stop: it changes to refusing by itself when no request has come for
    its `quiet_s`, or after its `bound_s`. So with this balancer nobody may ask the gate to refuse at once: wait for its own
    phase two.
    """

    said = "a balancer that asks for readiness by itself"
    epoch = 0

    async def take_out(self) -> Outcome:
        """Nothing is done: the drain itself is what it sees."""
        return done("the balancer is told nothing: it sees that the engine is not ready", readiness=True)

    async def put_back(self) -> Outcome:
        """Nothing is done: the end of the drain is what it sees."""
        return done("the balancer is told nothing: it sees that the engine is ready", readiness=True)

    async def is_out(self) -> bool | None:
        """Not known."""
        return None

    async def connections(self) -> int | None:
        """Not known."""
        return None


def _outcome(told: Told, well: str) -> Outcome:
    if told.is_so is True:
        return done(told.says or well)
    if told.is_so is None:
        return unsure(told.says or "the hook does not know")
    return failed(told.says or "not yet", again=told.may_come)


def _last_line(data: bytes) -> str:
    lines = data.decode("utf-8", "replace").strip().splitlines()
    return quoted_words(lines[-1]) if lines else ""
