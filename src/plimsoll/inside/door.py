"""The door: refuses requests that the certificate cannot cover, or only counts them. Off unless PLIMSOLL_ADMIT is set.

    PLIMSOLL_ADMIT=certified|shadow PLIMSOLL_CERTIFICATE=FILE vllm serve MODEL --middleware plimsoll.inside.Gate

Here are the accounts: what the admitted requests of this API server may bring into one step, kind by kind. They lie on the
server's own page too, and the sum over all API servers is judged. What knows vLLM is in door_vllm.py.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.inside.answers import Answer, retry_headers
from plimsoll.inside.certificate import Certificate, Kind
from plimsoll.inside.faults import FAULTS
from plimsoll.inside.settings import Settings

if TYPE_CHECKING:
    from plimsoll.inside.shared import Shared

OFF, CERTIFIED, SHADOW = "off", "certified", "shadow"
NEVER, NOT_NOW = "never", "not_now"
WHYS = (NEVER, NOT_NOW)
REFUSED, WOULD = "refused", "would"
# The kinds that one request makes; each has its fields on every API server's page.
KINDS = ("prompt_logprobs", "logprobs", "penalties", "pictures", "adapter")
FIELDS = tuple(
    f"door_{kind}_{count}"
    for kind in KINDS
    for count in ("units", *(f"{does}_{why}" for does in (REFUSED, WOULD) for why in WHYS))
)
PARAMETERS = {"prompt_logprobs": "prompt_logprobs", "logprobs": "logprobs", "adapter": "model"}  # as a 400 names them
GIB = 2.0**30


class Refusal(NamedTuple):
    """Why a request is not let in."""

    why: str
    kind: str
    message: str

    def answer(self, retry_after_s: int) -> Answer:
        """400 or 503, in the form of vLLM's own errors."""
        if self.why == NEVER:
            status, name, param = 400, "BadRequestError", PARAMETERS.get(self.kind)
        else:
            status, name, param = 503, "Service Unavailable", None
        body = {"error": {"message": self.message, "type": name, "param": param, "code": status}}
        return Answer(status, body, retry_headers(retry_after_s)[:1] if self.why == NOT_NOW else ())


@dataclass
class Passage:
    """One HTTP request on its way through the gate: the refusal that the door gave it, if any."""

    refusal: Refusal | None = None


PASSAGE: contextvars.ContextVar[Passage | None] = contextvars.ContextVar("plimsoll_passage", default=None)


class Ask(NamedTuple):
    """What one request, with all its copies, asks of a kind."""

    units: float
    adds_up: bool  # with what other requests of the same step ask


@dataclass
class _Hold:
    """What an admitted request holds, by kind, until all its copies have ended."""

    units: Mapping[str, int]
    to_come: int
    living: set[str] = field(default_factory=set)


class Door:
    """The accounts of one process, and the verdict on each request that comes."""

    def __init__(self) -> None:
        self.mode = OFF
        self.open_because = ""
        self.certificate: Certificate | None = None
        self.not_judged: tuple[str, ...] = ()
        self.kinds: Mapping[str, Kind] = {}
        """The kinds that are judged, by name."""
        self.is_running: Callable[[str], bool] = lambda name: True  # noqa: ARG005 - until an engine is known
        self._shared: Shared | None = None
        self._own = dict.fromkeys(FIELDS, 0)  # this server's part; its page shows the same
        self._holds: dict[str, _Hold] = {}
        self._keys: dict[str, list[str]] = {}  # of each living request: what it holds

    # Setting up

    def use(self, mode: str, certificate: Certificate, judged: Mapping[str, Kind]) -> None:
        """Judge requests of these kinds from here on."""
        self.mode, self.certificate, self.open_because = mode, certificate, ""
        self.kinds = dict(judged)
        self.not_judged = tuple(kind.kind for kind in certificate.kinds if kind.is_open and kind.kind not in judged)

    def stay_open(self, mode: str, because: str) -> None:
        """Refuse nothing, and say why."""
        self.mode, self.certificate, self.open_because = mode, None, because
        self.kinds, self.not_judged = {}, ()

    def join(self, shared: Shared) -> None:
        """Show the accounts on this API server's page from here on, and take in those of its fellows."""
        self._shared = shared
        for name, value in self._own.items():
            self._write(name, value)

    def part(self, shared: Shared) -> None:
        """That page goes away."""
        if self._shared is shared:
            self._shared = None

    @property
    def refuses(self) -> bool:
        """Whether a request may be refused at all."""
        return self.mode == CERTIFIED and bool(self.kinds)

    # Admitting

    def admit(self, name: str, key: str, asks: Mapping[str, Ask], copies: int = 1) -> Refusal | None:
        """Hold what a request takes, all its copies at once; the refusal where it is not covered, and then nothing is held.

        `name` is the first copy's own name, `key` that of the whole.
        """
        if self.certificate is None or not asks:
            return None
        spare = self.certificate.spare_bytes
        costs = {kind: self.kinds[kind].cost(ask.units) for kind, ask in asks.items()}
        largest = max(costs, key=lambda kind: costs[kind])
        if costs[largest] > spare:
            return self._refuse(NEVER, largest, asks[largest].units, costs[largest])
        held = {kind: int(ask.units) for kind, ask in asks.items() if ask.adds_up and self.kinds[kind].scope == "step"}
        full = self._take(held, spare)
        if full and self._drop_the_lost():
            full = self._take(held, spare)
        if full:
            return self._refuse(NOT_NOW, full, asks[full].units, costs[full])
        if held:
            if key in self._holds:
                self._change(self._holds[key].units, -1)
            self._holds[key] = _Hold(held, copies - 1, {name})
            self._keys.setdefault(name, []).append(key)
        return None

    def join_copy(self, name: str, key: str) -> None:
        """Another copy of an admitted request is here."""
        hold = self._holds.get(key)
        if hold is not None:
            hold.to_come -= 1
            hold.living.add(name)
            self._keys.setdefault(name, []).append(key)

    def _take(self, units: Mapping[str, int], spare: float) -> str:
        """Put units on the account, then look at the sum: of two servers that do so at once neither sees too little.

        The kind of which there is too much; then the account is as before.
        """
        self._change(units, 1)
        full = next((kind for kind in units if self.admitted_bytes(kind) > spare), "")
        if full:
            self._change(units, -1)
        return full

    def _refuse(self, why: str, kind: str, units: float, cost: float) -> Refusal:
        assert self.certificate is not None
        count = f"door_{kind}_{REFUSED if self.mode == CERTIFIED else WOULD}_{why}"
        self._write(count, self._own[count] + 1)
        spare = self.certificate.spare_bytes / GIB
        unit = self.kinds[kind].unit
        what = f"{kind}, {units:.0f} {unit.removesuffix('s') if units == 1 else unit}, may take {cost / GIB:.2f} GiB"
        if why == NEVER:
            message = (
                f"this server cannot run this request within its GPU memory: {what} beside a full batch, and {spare:.2f} GiB "
                "are spare; ask for less"
            )
        else:
            message = (
                f"this server has no GPU memory for this request now: {what}, and requests that are here may need "
                f"{self.admitted_bytes(kind) / GIB:.2f} of {spare:.2f} GiB; try again later or on a different instance"
            )
        return Refusal(why, kind, message)

    # Giving back

    def leave(self, name: str) -> None:
        """A request or a copy of one has ended, however it did; the second time does nothing."""
        for key in self._keys.pop(name, ()):
            self._let_go(key, name)

    def undo(self, name: str, key: str) -> None:
        """It was admitted, and vLLM did not take it."""
        keys = self._keys.get(name, [])
        if key in keys:
            keys.remove(key)
            if not keys:
                del self._keys[name]
            self.end_whole(key)
            self._let_go(key, name)

    def end_whole(self, key: str) -> None:
        """No further copy of this request comes."""
        hold = self._holds.get(key)
        if hold is not None:
            hold.to_come = 0
            self._let_go(key, "")

    def _let_go(self, key: str, name: str) -> None:
        hold = self._holds.get(key)
        if hold is None:
            return
        hold.living.discard(name)
        if not hold.living and hold.to_come <= 0:
            del self._holds[key]
            self._change(hold.units, -1)

    def _drop_the_lost(self) -> bool:
        """Give back what requests hold that vLLM no longer has; whether there were any."""
        lost = [key for key, hold in self._holds.items() if not any(self.is_running(name) for name in hold.living)]
        for key in lost:
            hold = self._holds.pop(key)
            for name in hold.living:
                self._keys.pop(name, None)
            self._change(hold.units, -1)
        return bool(lost)

    # Accounts

    def _change(self, units: Mapping[str, int], sign: int) -> None:
        for kind, count in units.items():
            name = f"door_{kind}_units"
            self._write(name, max(0, self._own[name] + sign * count))

    def _write(self, name: str, value: int) -> None:
        self._own[name] = value
        if self._shared is not None:
            try:
                self._shared.own[name] = value
            except ValueError:  # closed: this server ends
                self._shared = None

    def _total(self, name: str) -> int:
        fellows = [] if self._shared is None else self._shared.pages()[1:]
        return self._own[name] + sum(page[name] for page in fellows)

    def admitted_bytes(self, kind: str) -> float:
        """The most that one step may take for all admitted requests of a kind, over all API servers."""
        return self.kinds[kind].cost(self._total(f"door_{kind}_units"))

    # Told

    def own_count(self, does: str, kind: str, why: str) -> int:
        """How often this API server `refused`, or `would`, a request of this kind."""
        return self._own[f"door_{kind}_{does}_{why}"]

    def words(self) -> dict[str, Any]:
        """The door as /plimsoll/state shows it."""
        return {
            "mode": self.mode,
            "open_because": self.open_because,
            "spare_bytes": None if self.certificate is None else int(self.certificate.spare_bytes),
            "admitted_bytes": int(max((self.admitted_bytes(kind) for kind in self.kinds), default=0)),
            "refused": self._counts(REFUSED),
            "would_refuse": self._counts(WOULD),
            "kinds": list(self.kinds),
            "not_judged": list(self.not_judged),
        }

    def _counts(self, does: str) -> dict[str, dict[str, int]]:
        found = {why: {kind: self._total(f"door_{kind}_{does}_{why}") for kind in KINDS} for why in WHYS}
        return {why: {kind: count for kind, count in counts.items() if count} for why, counts in found.items()}


DOOR = Door()  # one a process


def install() -> None:
    """vLLM calls this in each of its processes: the door goes into every engine client made there, if one is asked for."""
    try:
        settings = Settings()
        if settings.admit:
            from plimsoll.inside.door_vllm import install_into_vllm

            install_into_vllm(DOOR, settings)
    except Exception as error:
        FAULTS.note("installing the door", error)
