"""A fleet, its guards and its operators for some minutes, with faults drawn from a seed; what must hold is checked each time.

story = play(seed)      # story.wrong is empty, or what was violated; str(story) tells at most 40 lines of it
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plimsoll.guard.act.policy import ActPolicy
from plimsoll.guard.adapters.haproxy import FORCED_MAINT
from plimsoll.guard.daemon.engine_look import WARM_S
from tests.world.engine import Core, Engine
from tests.world.faults import CALM_S, Fault, draw_faults
from tests.world.guards import Host
from tests.world.loop import VirtualLoop
from tests.world.surroundings import LockService, Network, Proxy, Supervisor

SETTLE_S = 1_500.0  # after the last one, until all must be well or told
RECENT_S = 5.0  # whoever recovered later than this could not be known to have
PEERS_S = 60.0  # and so it is of another engine that broke
FLIPPED_S = 15.0  # and a server that the balancer's own checks find down, while another one is being drained
LINES = 40
_NOBODY = contextvars.Context()


@dataclass(frozen=True)
class Setting:
    """What does not change during one story."""

    engines: int = 2
    guards: int = 1
    balancer: str = "haproxy"
    has_gate: bool = True
    knows_how: bool = True
    canary_s: float | None = 10.0
    every_s: float = 5.0
    busy: float = 0.2  # requests a second
    refused_s: float = 60.0
    still_s: float = 60.0
    contstats: bool = True  # the balancer counts the bytes of a stream while it lasts
    act: ActPolicy = field(default_factory=ActPolicy)


def draw_setting(dice: random.Random) -> Setting:
    act = ActPolicy(
        restarts_per_hour=dice.choice((1, 2, 3)), restarts_per_day=6, fleet_restarts_per_hour=dice.choice((2, 4)),
        fleet_restarts_per_day=20, backoff_s=30.0, longest_backoff_s=60.0, drain_within_s=60.0,
        lease_s=dice.choice((15.0, 30.0)), stop_within_s=20.0, gone_within_s=20.0, start_still_s=60.0, start_within_s=180.0,
        probation_s=dice.choice((20.0, 60.0)),
        rollout_s=dice.choice((0.0, 120.0)),
    )  # fmt: skip
    return Setting(
        engines=dice.choice((1, 2, 2, 2, 3, 3)), guards=dice.choice((1, 1, 2)),
        balancer=dice.choice(("haproxy", "haproxy", "readiness")), has_gate=dice.random() < 0.75,
        knows_how=dice.random() < 0.6, canary_s=dice.choice((None, 10.0, 10.0)), every_s=dice.choice((5.0, 10.0, 10.0)),
        busy=dice.choice((0.0, 0.05, 0.3)), refused_s=dice.choice((30.0, 90.0)), still_s=dice.choice((40.0, 60.0)), act=act,
        contstats=dice.random() < 0.5,
    )  # fmt: skip


class World:
    """Everything there is, and everything that happened."""

    def __init__(self, seed: int, folder: Path, setting: Setting | None = None) -> None:
        self.seed = seed
        self.loop = VirtualLoop()
        self.setting = setting or draw_setting(self.dice("setting"))
        self.lines: list[str] = []
        self.wrong = ""
        self.is_over = False
        self.engines = [
            Engine(f"e{number}", lambda: self.loop.now, self.later, self.note) for number in range(self.setting.engines)
        ]
        self.supervisors: dict[str, Supervisor] = {one.name: Supervisor(one, self.setting.knows_how) for one in self.engines}
        self.network: Network = Network(self)
        self.proxy: Proxy = Proxy(self)
        self.lock = LockService()
        self.hosts = [Host(self, f"g{number}", folder / f"g{number}") for number in range(self.setting.guards)]
        self.starts: list[tuple[str, str]] = []  # that guards made: which guard, and of which engine
        self.stops: dict[tuple[str, str], float] = {}  # when each guard last stopped an engine
        self.asked: dict[str, float] = {}  # restarts and drains that an operator asked for
        self.left_alone: dict[str, float] = {}  # by an operator's stop, maintenance or pause, and since when
        self.requests = 0

    def dice(self, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what}")

    def later(self, delay_s: float, work: Callable[..., Any], *args: Any) -> None:
        """In nobody's context: the world itself does it."""
        self.loop.call_later(delay_s, work, *args, context=_NOBODY.copy())

    def at(self, url: str) -> Engine | None:
        return next((one for one in self.engines if url.startswith(one.url)), None)

    def note(self, line: str) -> None:
        if not self.is_over:
            self.lines.append(f"{self.loop.now:7.1f} s  {line}")

    def violate(self, what: str) -> None:
        if not self.wrong and not self.is_over:
            self.note(f"VIOLATION: {what}")
            self.wrong = what

    # What must hold at every step

    def check_stop(self, guard: str, engine: Engine) -> None:
        """Guard is about to stop this engine."""
        now, host = self.loop.now, next(host for host in self.hosts if host.name == guard)
        self.note(f"{guard}: stops {engine.name}, which {self.truth(engine)}")
        # A paused guard begins nothing; what one before it left half done, the next one finishes.
        is_paused = host.paused_at is not None and host.since <= host.paused_at and engine.name not in self.asked
        if is_paused and now - (host.paused_at or 0.0) > RECENT_S + self.setting.act.stop_within_s:
            self.violate(f"{guard} acts on {engine.name} while it is paused")
        before_s, self.stops[guard, engine.name] = self.stops.get((guard, engine.name), -math.inf), now
        if engine.name in self.left_alone and not self._is_left_alone_told(engine):
            self.stops[guard, engine.name] = -math.inf  # nobody could know, and the start that follows cannot either
        if not engine.is_up:
            return
        self._check_left_alone(guard, engine)
        holder, is_held = self.lock.holder, self.lock.since < now - RECENT_S and now < self.lock.until
        if holder is not None and holder.guard != guard and is_held:
            self.violate(f"{guard} stops {engine.name} while {holder.guard} has the lock")
        is_known = engine.is_alive and now - engine.alive_since > RECENT_S and not self._is_silent(engine)
        is_new = engine.alive_since > before_s > now - 30.0  # its supervisor started it while guard's own stop took effect
        if engine.is_ending or is_new or self._is_insisted_on(host, engine):
            return
        if is_known and engine.requests:
            self.violate(f"{guard} stops {engine.name} with {len(engine.requests)} requests in flight")
        if is_known and engine.name not in self.asked:
            self.violate(f"{guard} stops {engine.name} without proof: it {self.truth(engine)}")
        if self._is_last(host, engine):
            self.violate(f"{guard} stops {engine.name}, the last one that serves")

    def _is_insisted_on(self, host: Host, engine: Engine) -> bool:
        """Guard cannot see it and has said so, no balancer sees it, and then an operator asks for its restart all the same."""
        link, asked_at = self.network.link(host.name, engine.name), self.asked.get(engine.name, -math.inf)
        is_told = any(name == engine.name and at_s < asked_at + RECENT_S for (name, _, _), at_s in host.told.items())
        is_checked = self.setting.balancer == "haproxy" and not self.proxy.is_down and engine.name not in self.proxy.cut
        return is_told and link.is_cut and not is_checked

    def _is_silent(self, engine: Engine) -> bool:
        """One that its balancer finds down, without a byte of an answer for a minute, serves nobody."""
        is_found_down = self.setting.balancer == "haproxy" and not self.proxy.check(engine)
        return is_found_down and self.loop.now - engine.last_byte_at > 60.0

    def check_start(self, guard: str, engine: Engine) -> None:
        """Guard is about to start this engine."""
        if engine.is_up:
            return
        # From its stop on a restart only goes forward: what an operator wants since then comes too late.
        if self.stops.get((guard, engine.name), -math.inf) > self.left_alone.get(engine.name, math.inf) + RECENT_S:
            self._check_left_alone(guard, engine)
        self.starts.append((guard, engine.name))
        # A guard cannot know of another one's start whose process never answered: each keeps to the budget.
        act, jumps = self.setting.act, sum(host.jumps for host in self.hosts)
        fleet = [name for who, name in self.starts if who == guard]
        own = fleet.count(engine.name)
        if own > act.restarts_per_hour * (1 + jumps) or len(fleet) > act.fleet_restarts_per_hour * (1 + jumps):
            self.violate(f"{guard} starts {engine.name}: {own} of its own and {len(fleet)} of the fleet's in an hour")

    def check_not_last(self, guard: str, name: str) -> None:
        engine = next(one for one in self.engines if one.name == name)
        host = next(host for host in self.hosts if host.name == guard)
        if self.loop.now - engine.healthy_since > RECENT_S and self._is_last(host, engine):
            self.violate(f"{guard} takes {name} out, the last one that serves")

    def _is_last(self, host: Host, engine: Engine) -> bool:
        """It is the last one that serves, and this guard could see the others as they are."""
        sees = self.loop.now - host.is_fine_since > PEERS_S
        return engine.serves and sees and not self._is_silent(engine) and not self._others(engine)

    def _check_told(self, engine: Engine) -> None:
        """A hang with requests there is told in time, also the second time; where nothing hinders guard.

        A step that took long, and less than a failure does, is one of its own: three times as long may be one, too.
        """
        since = self._hangs_in_sight_since(engine)
        hosts = [host for host in self.hosts if host.is_fine_since < since - CALM_S / 2]
        bound_s = self._told_within_s(engine)
        if hosts and self.loop.now - since > bound_s and not any(host.is_telling(engine.name) for host in hosts):
            self.violate(
                f"{engine.name} hangs with {len(engine.requests)} requests for {self.loop.now - since:.0f} s: nobody was told"
            )

    def _hangs_in_sight_since(self, engine: Engine) -> float:
        """A page that lies, or an API too slow to answer, hides a hang: guard begins to count when it sees the engine again."""
        return max(engine.hangs_since, self._lied_until(engine), min(engine.overload_until, self.loop.now))

    def _told_within_s(self, engine: Engine) -> float:
        # Of a longer call guard may see a part: requests came late in it. An old page stands still as long a step does.
        setting = self.setting
        normal_s = min(setting.still_s, max(engine.old_page_s, *engine.calls_s, 0.0) + 2 * setting.every_s)
        return max(setting.still_s, 3 * normal_s) + 4 * setting.every_s + 45.0

    def _check_left_alone(self, guard: str, engine: Engine) -> None:
        if self.loop.now - self.left_alone.get(engine.name, math.inf) > RECENT_S and self._is_left_alone_told(engine):
            self.violate(f"{guard} acts on {engine.name}, which an operator wants left alone")

    def _is_left_alone_told(self, engine: Engine) -> bool:
        """Nobody can know of a stop that the supervisor never told, nor of maintenance at a balancer that gives no answer."""
        is_stopped = not engine.is_up and engine.ended_how == "by hand"
        told_at = self.supervisors[engine.name].told_at if is_stopped else self.proxy.told_at
        return told_at >= self.left_alone[engine.name]

    def _others(self, engine: Engine) -> bool:
        """Whether another one serves, broke so lately that nobody can know, or is paused by its operator."""
        others = [one for one in self.engines if one is not engine]
        serving = (one.is_ready and (one.is_alive or one.is_hidden) and self._is_in(one) for one in others)
        return any(serving) or any(not self._is_known_broken(one) for one in others)

    def _is_known_broken(self, engine: Engine) -> bool:
        known_at = PEERS_S + max(engine.changed_at, self._lied_until(engine))
        if engine.core is Core.HANGS:
            known_at = max(known_at, self._hangs_in_sight_since(engine) + self._told_within_s(engine))
        return self.loop.now >= known_at

    def _is_in(self, engine: Engine) -> bool:
        if self.setting.balancer == "haproxy" and self.proxy.admin.get(engine.name, 0):
            return False
        return not engine.has_gate or engine.phase == "serving"

    def truth(self, engine: Engine) -> str:
        if not engine.is_up:
            return f"is down ({engine.ended_how})"
        state = "is starting" if not engine.is_ready else "is paused" if engine.is_paused else f"{engine.core}"
        return f"{state}, {len(engine.requests)} requests"

    # Clients

    def send(self) -> None:
        """A client's request, through the balancer, tried at every engine that it would send to."""
        dice = self.client_dice
        self.later(dice.expovariate(self.setting.busy), self.send)
        self.requests += 1
        seconds = dice.choice((0.5, 2.0, 8.0, 30.0))
        sends = self.proxy.sends if self.setting.balancer == "haproxy" else self.proxy.check
        engines = [one for one in self.engines if sends(one)]
        dice.shuffle(engines)
        if any(one.take(self.requests, seconds) for one in engines):
            return
        # One that is too slow to answer guard cannot be put back before guard has seen it well.
        is_askable = {one.name: self.loop.now - one.overload_until > PEERS_S for one in self.engines}
        kept_out = [
            one for one in self.engines
            if one.serves and is_askable[one.name] and not self._is_in(one) and not self._is_excused(one)
        ]  # fmt: skip
        is_fresh = any(self.loop.now - one.changed_at < PEERS_S for one in self.engines)
        is_fresh = is_fresh or self.loop.now - self.proxy.flipped_at < FLIPPED_S
        # A warm-up request that a call or a proxy lets hang, or a bad way loses, is waited for: a process's first may compile.
        hung_until = [max(self._lied_until(one), one.called_until) for one in self.engines]
        is_fresh = is_fresh or any(self.loop.now - until < WARM_S + PEERS_S for until in hung_until)
        is_hindered = any(self.loop.now - host.is_fine_since < WARM_S + PEERS_S for host in self.hosts)
        if kept_out and not is_fresh and not is_hindered:
            self.violate(f"a request is lost: {kept_out[0].name} serves, and is out of rotation")

    def _lied_until(self, engine: Engine) -> float:
        """When its page last was an old one: now, where it still is."""
        return max(engine.lied_until, min(engine.old_page_until, self.loop.now))

    def _is_excused(self, engine: Engine) -> bool:
        """An operator wants it out, or was told that it is."""
        is_maintained = bool(self.proxy.admin.get(engine.name, 0) & FORCED_MAINT)  # a rollout does not end it
        return is_maintained or engine.name in self.left_alone or any(host.needs(engine.name) for host in self.hosts)

    # From the beginning to the end

    def run(self, script: Callable[[World], list[Fault]]) -> None:
        for engine in self.engines:
            engine.has_gate = self.setting.has_gate
            engine.start_s = self.dice(engine.name).choice((8.0, 20.0, 40.0))
            engine.start("its operator")
            engine.ready_at = 0.0
        self.client_dice = self.dice("clients")
        if self.setting.busy:
            self.later(0.0, self.send)
        for host in self.hosts:
            self.later(self.dice(host.name).uniform(0.0, 3.0), host.start)
        faults = script(self)
        for at_s, what, begin in faults:
            self.later(at_s, self.note, f"* {what}")
            self.later(at_s, begin)
        end_s = max(at_s for at_s, _, _ in faults) + self.dice("end").choice((20.0, 60.0, 180.0))
        self._watch_deaths()
        self.loop.run(end_s, lambda: bool(self.wrong))
        self.heal()
        self.loop.run(end_s + SETTLE_S, self._is_settled_now)
        if not self.wrong and (why := self.unsettled()):
            self.violate(f"at the end: {why}")

    def _is_settled_now(self) -> bool:
        if self.wrong:
            return True
        if self.loop.now < self._next_check:
            return False
        self._next_check = self.loop.now + 10.0
        return not self.unsettled()

    _next_check = 0.0

    def _watch_deaths(self) -> None:
        """Guards that were killed at a moment of their own are started again; internal errors are violations."""
        for host in self.hosts:
            if host.life.is_dead and host.guard is not None:
                host.buried(self.dice(f"again {host.lives}").choice((1.0, 5.0, 40.0)))
            if host.guard is not None and host.guard.mistakes:
                self.violate(f"{host.name}: internal errors {host.guard.mistakes}")
        for engine in self.engines:
            self.proxy.check(engine)
            self._check_told(engine)
        self.later(2.0, self._watch_deaths)

    def heal(self) -> None:
        """Every fault of what stands around the engines is over; the engines are as they are."""
        self.note("* every fault around the engines is over")
        self.network.links.clear()
        self.proxy.is_down = False
        self.proxy.cut.clear()
        for host in self.hosts:
            host.disk.is_full, host.disk.slow_s = False, 0.0
            host.life.dies_at = -1
            if host.life.is_frozen:
                self.loop.thaw(host.life)
        for engine in self.engines:
            engine.lied_until = min(engine.old_page_until, self.loop.now)
            engine.overload_until = min(engine.overload_until, self.loop.now)
            engine.says_503_until = engine.old_page_until = -1.0
        for supervisor in self.supervisors.values():
            supervisor.is_silent = supervisor.hangs = supervisor.flaps = False

    def unsettled(self) -> str:
        """What is neither well nor told; "" once all is."""
        now = self.loop.now
        for engine in self.engines:
            is_told = any(host.is_telling(engine.name) for host in self.hosts if host.guard is not None)
            is_wanted = engine.name not in self.left_alone
            is_hidden = engine.is_hidden and (self.setting.canary_s is None or engine.was_paused)
            if not engine.is_alive and is_wanted and not is_told and not is_hidden:
                return f"{engine.name} {self.truth(engine)}, and nobody was told"
            if engine.is_alive and not engine.is_ready:
                return f"{engine.name} is still starting"
            # What guard gave up on comes back when it has recovered; a paused guard leaves it.
            is_paused = any(host.paused_at is not None for host in self.hosts)
            if engine.serves and not self._is_in(engine) and is_wanted and not (is_paused and self._is_excused(engine)):
                return f"{engine.name} serves, and is out of rotation"
        return "" if all(host.guard is not None and now - host.since > 30.0 for host in self.hosts) else "a guard is down"


@dataclass(frozen=True)
class Story:
    """What became of one seed."""

    seed: int
    wrong: str
    setting: Setting
    lines: list[str]

    def __str__(self) -> str:
        head = [f"seed {self.seed}: {self.wrong or 'all is well'}", str(self.setting).partition(", act=")[0] + ")"]
        shown = self.lines
        if len(shown) > LINES - len(head):
            faults = [line for line in shown[: -LINES // 2] if "  * " in line][: LINES // 4]
            shown = [*faults, "...", *shown[-(LINES - len(head) - len(faults) - 1) :]]
        return "\n".join(head + [line[:200] for line in shown])


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="plimsoll-world-") as folder:
        yield Path(folder)


def play(
    seed: int, folder: Path | None = None, setting: Setting | None = None, script: Callable[[World], list[Fault]] = draw_faults
) -> Story:
    """Plays one seed: a setting and faults that it draws, or that are given."""
    with contextlib.ExitStack() as stack:
        place = (folder or stack.enter_context(quick_folder())) / f"{seed}"
        place.mkdir()
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        world = World(seed, place, setting)
        try:
            world.run(script)
        finally:
            world.is_over = True
            world.loop.end([life for host in world.hosts for life in host.all_lives])
            for host in world.hosts:
                host.close()
            shutil.rmtree(place, ignore_errors=True)
    return Story(world.seed, world.wrong, world.setting, world.lines)


def play_some(seeds: range) -> list[tuple[int, str]]:
    """The seeds that end in a violation, with their stories."""
    with quick_folder() as folder:
        return [(seed, str(story)) for seed in seeds if (story := play(seed, folder)).wrong]
