"""Any other balancer, by a command or a webhook of the user's own; docs/balancers.md has the contract.

Four verbs: take-out, put-back, is-out, connections. A command is started without a shell, in a session of its own, with a time
limit after which its whole group is killed, and with a small environment: nothing of guard's own, which holds its tokens.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.gate import quoted_words
from plimsoll.guard.adapters.run_command import PLAIN, last_line, run_command, small_environment
from plimsoll.net.http_call import Lost, Server, number

DEADLINE_S = 30.0
SCHEMA = "plimsoll.hook/1"
TAKE_OUT, PUT_BACK, IS_OUT, CONNECTIONS = "take-out", "put-back", "is-out", "connections"
DEEDS = (TAKE_OUT, PUT_BACK)
NOT_YET = 3  # the exit code of a command that says "no", or "ask again"
MOST_TAIL = 16 << 10
MOST_CONNECTIONS = 10_000_000
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


@dataclass(frozen=True, slots=True)
class CommandBalancerConfig(key.Table):
    """balancer = {command = [...]}."""

    command: tuple[str, ...] = key.command(
        "a command of yours, with {verb} and {engine}: docs/balancers.md", example='["/usr/local/bin/lb", "{verb}", "{engine}"]'
    )

    def build(self, engine: str) -> CommandBalancer:
        """The command, for this engine."""
        return CommandBalancer(self.command, engine)


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
        words = [_PLACES.sub(lambda found: {"verb": verb, "engine": self._engine}[found[1]], word) for word in self._command]
        own = {"PLIMSOLL_VERB": verb, "PLIMSOLL_ENGINE": self._engine, "PLIMSOLL_EPOCH": str(self.epoch)}
        environment = small_environment({**self._environment, **own}, PLAIN)
        ran = await run_command(words, self._deadline_s, environment, only_stdout=True, folder="/", keep_bytes=MOST_TAIL)
        if not ran.was_started:
            return Told(is_so=False if verb in DEEDS else None, says=ran.trouble)
        if ran.code is None:
            return Told(is_so=None, says=f"{ran.trouble} and was killed")
        says = quoted_words(ran.last_line or (last_line(ran.complaints) if ran.code else ""))
        if ran.code == 0 and verb == CONNECTIONS:
            number_said = int(says) if says.isascii() and says.isdecimal() and len(says) < 9 else None
            return Told(is_so=None if number_said is None else True, says=says, number=number_said)
        if ran.code == 0:
            return Told(is_so=True, says=says)
        if ran.code == NOT_YET:
            return Told(is_so=False, says=says, may_come=True)
        # A question that failed is not answered; a deed that failed was not done. Somebody else's signal came at any moment.
        how = f"signal {-ran.code}" if ran.code < 0 else f"exit code {ran.code}"
        return Told(is_so=False if verb in DEEDS and ran.code > 0 else None, says=f"{how}{': ' if says else ''}{says}")


@dataclass(frozen=True, slots=True)
class WebhookBalancerConfig(key.Table):
    """balancer = {webhook = ...}."""

    url: str = key.url("an address of yours: docs/balancers.md", key="webhook", example='"http://HOST:PORT/PATH"')
    token: str | None = key.secret("shown to the webhook as Authorization: Bearer", shortest=1)

    def build(self, engine: str) -> WebhookBalancer:
        """The webhook, for this engine."""
        return WebhookBalancer(self.url, engine, None if self.token is None else f"Bearer {self.token}")


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


@dataclass(frozen=True, slots=True)
class ReadinessConfig(key.Table):
    """balancer = "readiness"."""

    word: ClassVar[str] = "readiness"

    def build(self, engine: str) -> ReadinessOnly:
        """A balancer that is told nothing."""
        del engine
        return ReadinessOnly()


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
