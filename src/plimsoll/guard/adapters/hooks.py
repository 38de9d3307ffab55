"""Any other balancer, through the user's own command or webhook; docs/balancers.md has the contract.

Four verbs: take-out, put-back, is-out, connections. A command is started without a shell, in a session of its own, with a time
limit after which its whole group is killed, and with a small environment: nothing of guard's own, which holds its tokens.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from plimsoll.errors import BadInput
from plimsoll.guard import config_fields as key
from plimsoll.guard.act.ports import Outcome, done, failed, unsure
from plimsoll.guard.adapters.gate import quoted_words
from plimsoll.guard.adapters.run_command import PLAIN, last_line, run_command, small_environment
from plimsoll.net.client import HttpClient, Lost, number

DEADLINE_S = 30.0
SCHEMA = "plimsoll.hook/1"
TAKE_OUT, PUT_BACK, IS_OUT, CONNECTIONS = "take-out", "put-back", "is-out", "connections"
ACTIONS = (TAKE_OUT, PUT_BACK)
NOT_YET = 3  # the exit code of a command that says "no", or "ask again"
MOST_TAIL = 16 << 10
MOST_CONNECTIONS = 10_000_000
_PLACES = re.compile(r"\{(verb|engine)\}")


class _Hook(abc.ABC):
    """A balancer behind a command or a webhook."""

    def __init__(self, label: str) -> None:
        self.epoch = 0  # of the lock's holder; set before each action
        self.label = label

    async def take_out(self) -> Outcome:
        return await self._act(TAKE_OUT, "out")

    async def put_back(self) -> Outcome:
        return await self._act(PUT_BACK, "back in")

    async def is_out(self) -> bool | None:
        """True if the balancer reports it out of rotation; None where the hook cannot tell."""
        return (await self._ask(IS_OUT)).is_done

    async def connections(self) -> int | None:
        """Returns the balancer's current connections to this engine; None where the hook cannot tell."""
        answer = await self._ask(CONNECTIONS)
        return int(answer.facts["connections"]) if answer.is_done and "connections" in answer.facts else None

    async def _act(self, verb: str, usual: str) -> Outcome:
        answer = await self._ask(verb)
        words = {True: usual, False: "not yet", None: "the hook does not know"}
        return answer._replace(message=answer.message or words[answer.is_done])

    @abc.abstractmethod
    async def _ask(self, verb: str) -> Outcome:
        """Returns the hook's answer to one verb: its sentence, `again` where asking again may help, and `connections`."""


@dataclass(frozen=True, slots=True)
class CommandBalancerConfig(key.ConfigTable):
    """balancer = {command = [...]}."""

    command: tuple[str, ...] = key.command(
        "a command of yours, with {verb} and {engine}: docs/balancers.md", example='["/usr/local/bin/lb", "{verb}", "{engine}"]'
    )

    def build(self, engine: str) -> CommandBalancer:
        return CommandBalancer(self.command, engine)


class CommandBalancer(_Hook):
    """A balancer behind a command: `["/usr/local/bin/lb", "{verb}", "{engine}"]`."""

    def __init__(
        self, command: Sequence[str], engine: str, *,
        deadline_s: float = DEADLINE_S, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`environment` is added to the few variables passed on. Raises BadInput where there is no program to start."""
        if not command or not command[0].startswith("/") or any("\0" in word for word in (*command, engine)):
            raise BadInput("a balancer's command is a list of words, the first of which is the whole path of a program")
        super().__init__(f"the command {command[0]}")
        self._command, self._engine, self._deadline_s = tuple(command), engine, deadline_s
        self._environment = dict(environment or {})

    async def _ask(self, verb: str) -> Outcome:
        argv = [_PLACES.sub(lambda found: {"verb": verb, "engine": self._engine}[found[1]], word) for word in self._command]
        own = {"PLIMSOLL_VERB": verb, "PLIMSOLL_ENGINE": self._engine, "PLIMSOLL_EPOCH": str(self.epoch)}
        environment = small_environment({**self._environment, **own}, PLAIN)
        ran = await run_command(argv, self._deadline_s, environment, only_stdout=True, folder="/", keep_bytes=MOST_TAIL)
        is_action = verb in ACTIONS
        if not ran.was_started:
            return failed(ran.trouble, again=False) if is_action else unsure(ran.trouble)
        if ran.code is None:
            return unsure(f"{ran.trouble} and was killed")
        words = quoted_words(ran.last_line or (last_line(ran.complaints) if ran.code else ""))
        if ran.code == 0 and verb == CONNECTIONS:
            is_count = words.isascii() and words.isdecimal() and len(words) < 9
            return done(words, connections=int(words)) if is_count else unsure(words)
        if ran.code == 0:
            return done(words)
        if ran.code == NOT_YET:
            return failed(words, again=True)
        # A failed question has no answer; a failed action was not done. A signal may have come at any moment.
        why = f"signal {-ran.code}" if ran.code < 0 else f"exit code {ran.code}"
        why += f": {words}" if words else ""
        return failed(why, again=False) if is_action and ran.code > 0 else unsure(why)


@dataclass(frozen=True, slots=True)
class WebhookBalancerConfig(key.ConfigTable):
    """balancer = {webhook = ...}."""

    url: str = key.url("an address of yours: docs/balancers.md", key="webhook", example='"http://HOST:PORT/PATH"')
    token: str | None = key.secret("shown to the webhook as Authorization: Bearer", shortest=1)

    def build(self, engine: str) -> WebhookBalancer:
        return WebhookBalancer(self.url, engine, None if self.token is None else f"Bearer {self.token}")


class WebhookBalancer(_Hook):
    """A balancer behind a webhook; `login` goes into the Authorization header and nowhere else."""

    def __init__(self, url: str, engine: str, login: str | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        """Raises BadInput for a wrong address, or a login that no header can carry."""
        if login is not None and not (login and login.isascii() and login.isprintable()):
            raise BadInput("the login of a balancer's webhook holds letters that a header cannot have")
        self._server = HttpClient(url)
        super().__init__(f"the webhook {self._server.shown}")
        self._headers = {} if login is None else {"Authorization": login}
        self._engine, self._deadline_s = engine, deadline_s

    async def _ask(self, verb: str) -> Outcome:
        fields = {"schema": SCHEMA, "verb": verb, "engine": self._engine, "epoch": self.epoch}
        reply = await self._server.call("POST", "", json.dumps(fields).encode(), self._headers, deadline_s=self._deadline_s)
        is_action = verb in ACTIONS
        if isinstance(reply, Lost):
            return failed(reply.why, again=False) if is_action and not reply.was_sent else unsure(reply.why)
        body = reply.table()
        words = quoted_words(body["says"]) if isinstance(body.get("says"), str) else ""
        if reply.status != 200:
            why = f"it answers {reply.status}" + (f": {words}" if words else "")
            return failed(why, again=False) if is_action and 300 <= reply.status < 500 else unsure(why)
        answer = body.get("done", "absent")
        if answer is not None and not isinstance(answer, bool):
            return unsure('its answer has no "done" that is true, false or null')
        counted = number(body.get("connections"), MOST_CONNECTIONS)
        if verb == CONNECTIONS and counted is None:
            return unsure(words or "it does not know")
        if answer is None:
            return unsure(words)
        if not answer:
            return failed(words, again=True)
        return done(words) if verb != CONNECTIONS or counted is None else done(words, connections=int(counted))


@dataclass(frozen=True, slots=True)
class ReadinessConfig(key.ConfigTable):
    """balancer = "readiness"."""

    word: ClassVar[str] = "readiness"

    def build(self, engine: str) -> ReadinessBalancer:
        del engine
        return ReadinessBalancer()


class ReadinessBalancer:
    """A balancer that asks /plimsoll/ready by itself, and stops sending when that answers 503.

    The drain's first phase tells it, so `take_out` is done at once, and `is_out` and `connections` are never known. Phase one
    ends when no request has reached the gate for its `quiet_s`, or after its `bound_s`. So nobody may ask the gate to refuse
    at once.
    """

    label = "a balancer that asks for readiness by itself"
    epoch = 0

    async def take_out(self) -> Outcome:
        """Does nothing: the balancer sees the drain itself."""
        return done("the balancer is told nothing: it sees that the engine is not ready", readiness=True)

    async def put_back(self) -> Outcome:
        """Does nothing: the balancer sees the end of the drain."""
        return done("the balancer is told nothing: it sees that the engine is ready", readiness=True)

    async def is_out(self) -> bool | None:
        return None

    async def connections(self) -> int | None:
        return None
