"""Faults, and operators who act: what a seed may bring, each with its weight."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from plimsoll.guard.adapters.haproxy import FORCED_MAINT
from plimsoll.guard.judge.tracker import Grade
from tests.world.engine import Core, Engine

if TYPE_CHECKING:
    from tests.world.guards import Host
    from tests.world.world import World

CALM_S = 30.0  # before the first fault
TROUBLE_S = 240.0  # in which faults begin
Fault = tuple[float, str, Callable[[], None]]  # when, what, and how it begins


class Draw:
    """One drawing: the dice, and whom it is about."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world, self.dice = world, dice
        self.engine: Engine = dice.choice(world.engines)
        self.host: Host = dice.choice(world.hosts)

    def any_of(self, *values: float) -> float:
        return self.dice.choice(values)

    def until(self, *seconds: float) -> float:
        return self.world.loop.now + self.dice.choice(seconds)

    def for_a_while(self, place: object, name: str, *seconds: float) -> None:
        """Sets something, and takes it back later."""
        setattr(place, name, True)
        self.world.later(self.dice.choice(seconds or (5.0, 15.0, 40.0, 120.0)), setattr, place, name, False)


def hangs_again(draw: Draw) -> None:
    """A hang that ends by itself, and then one that does not."""
    draw.engine.become(Core.CALLS, draw.any_of(50.0, 100.0))
    draw.world.later(draw.any_of(110.0, 140.0), draw.engine.become, Core.HANGS)


def dead_for_a_moment(draw: Draw) -> None:
    """/health says 503, and is well again."""
    if draw.engine.core is Core.WORKS:
        draw.engine.become(Core.DEAD)
        draw.engine.soon(draw.any_of(8.0, 12.0, 16.0, 20.0), draw.engine.become, Core.WORKS)


def old_page(draw: Draw) -> None:
    draw.engine.old_page_until = draw.until(30.0, 150.0, 300.0)
    draw.engine.old_page_s = draw.engine.old_page_until - draw.world.loop.now


def start_fails(draw: Draw) -> None:
    draw.engine.starts_fail = draw.dice.choice((1, 2, 9))
    draw.engine.die("crash")


def stop_fails(draw: Draw) -> None:
    draw.world.supervisors[draw.engine.name].stop_fails = draw.dice.choice((1, 2))
    draw.engine.become(Core.HANGS)


def way_is_cut(draw: Draw) -> None:
    """A guard's own way to one engine, or to all."""
    engines = draw.world.engines if draw.dice.random() < 0.5 else [draw.engine]
    seconds = draw.any_of(20.0, 100.0, 300.0)
    for engine in engines:
        link = draw.world.network.link(draw.host.name, engine.name)
        link.rejects = draw.dice.random() < 0.5
        draw.for_a_while(link, "is_cut", seconds)


def way_is_bad(draw: Draw) -> None:
    for engine in draw.world.engines:
        link = draw.world.network.link(draw.host.name, engine.name)
        link.loss, link.delay_s = draw.any_of(0.0, 0.1, 0.4), draw.any_of(0.0, 0.5, 4.0, 12.0)
        link.twice = draw.any_of(0.0, 0.5)


def balancer_is_cut(draw: Draw) -> None:
    """From one engine, which guard still sees."""
    draw.world.proxy.cut.add(draw.engine.name)
    draw.world.later(draw.any_of(5.0, 15.0, 40.0, 120.0), draw.world.proxy.cut.discard, draw.engine.name)


def balancer_reloads(draw: Draw) -> None:
    """It forgets what it was told."""
    for name, admin in draw.world.proxy.admin.items():
        draw.world.proxy.admin[name] = admin & FORCED_MAINT


def guard_is_killed(draw: Draw) -> None:
    """Soon, at one of its awaits."""
    draw.host.life.dies_at = draw.host.life.moments + 1 + int(draw.dice.expovariate(1 / 60.0))


def guard_is_frozen(draw: Draw) -> None:
    draw.host.life.is_frozen = True
    draw.world.later(draw.any_of(5.0, 15.0, 40.0, 120.0), draw.world.loop.thaw, draw.host.life)


def guard_is_stopped(draw: Draw) -> None:
    """By SIGTERM; its service manager starts it again."""
    handler = next(iter(draw.host.life.signals.values()), None)
    if handler is not None and not draw.host.life.is_dead:
        handler()


def disk_is_slow(draw: Draw) -> None:
    draw.host.disk.slow_s = draw.any_of(0.5, 4.0, 20.0)
    draw.world.later(60.0, setattr, draw.host.disk, "slow_s", 0.0)


def clock_jumps(draw: Draw) -> None:
    jump_s = draw.any_of(-3_600.0, -30.0, 30.0, 7_200.0, 3.2e7)
    draw.host.ahead_s += jump_s
    draw.host.jumps += 1  # back, too: what was written before then lies in the future, and counts no more

    def back() -> None:
        draw.host.ahead_s = 0.0
        draw.host.jumps += 1

    if draw.dice.random() < 0.5:
        draw.world.later(60.0, back)


def operator_stops(draw: Draw) -> None:
    """By the supervisor; where that can tell, guard must leave it."""
    if draw.world.setting.knows_how and draw.engine.is_up:
        draw.world.left_alone[draw.engine.name] = draw.world.loop.now
    draw.engine.die("by hand")


def operator_starts(draw: Draw) -> None:
    if not draw.engine.is_up:
        draw.world.left_alone.pop(draw.engine.name, None)
        draw.engine.start("an operator")


def operator_pauses_engine(draw: Draw) -> None:
    def resume() -> None:
        if draw.engine.core is not Core.HANGS:  # which does not answer: what its gate knows of is still a pause
            draw.engine.is_paused = False
            draw.engine.go_on()

    if draw.engine.core is Core.HANGS:  # it takes no such call
        return
    draw.engine.is_paused = True
    draw.engine.soon(draw.any_of(60.0, 200.0), resume)


def operator_maintains(draw: Draw) -> None:
    """Maintenance in the balancer, and its end."""
    if draw.world.setting.balancer != "haproxy":
        return
    name, admin = draw.engine.name, draw.world.proxy.admin

    def end() -> None:
        admin[name] = admin.get(name, 0) & ~FORCED_MAINT
        draw.world.left_alone.pop(name, None)

    admin[name] = admin.get(name, 0) | FORCED_MAINT
    draw.world.left_alone[name] = draw.world.loop.now
    draw.world.later(draw.any_of(60.0, 200.0), end)


def operator_rolls_out(draw: Draw) -> None:
    """Another release, one engine after the other, without asking guard."""

    def again(engine: Engine) -> None:
        engine.version = "0.33.0"
        engine.die("by hand")
        draw.world.left_alone.pop(engine.name, None)
        draw.world.later(2.0, engine.start, "a rollout")

    for place, engine in enumerate(draw.world.engines):
        draw.world.later(100.0 * place, again, engine)


def by_guardctl(draw: Draw, verb: str, host: Host | None = None) -> None:
    """As guardctl: a request to one guard's API."""
    host, engine, world = host or draw.host, draw.engine.name, draw.world
    desk = None if host.guard is None or host.life.is_dead else host.guard.desk
    if desk is None:
        return

    async def ask() -> None:
        try:
            if verb == "pause":
                desk.switch("", "", is_paused=True)
                host.paused_at = world.loop.now
            elif verb == "restart":
                await desk.ask(Grade.RESTART, engine)
            else:
                await (desk.drain if verb == "drain" else desk.undrain)(engine)
        except Exception as problem:
            world.note(f"guardctl {verb}: {problem}")

    if verb in ("restart", "drain"):
        world.asked[engine] = world.loop.now
    world.loop.begin(host.life, ask())


def operator_drains(draw: Draw) -> None:
    by_guardctl(draw, "drain")
    draw.world.later(draw.any_of(10.0, 60.0), by_guardctl, draw, "undrain")


def operator_pauses_guard(draw: Draw) -> None:
    for host in draw.world.hosts:
        by_guardctl(draw, "pause", host)


FAULTS: dict[str, tuple[float, Callable[[Draw], None]]] = {
    "crash": (3, lambda draw: draw.engine.die("crash")),
    "core dies": (3, lambda draw: draw.engine.become(Core.DEAD, draw.any_of(0.0, 3.0, 30.0))),
    "core hangs": (3, lambda draw: draw.engine.become(Core.HANGS)),
    "long call": (1, lambda draw: draw.engine.become(Core.CALLS, draw.any_of(30.0, 100.0))),
    "hangs again": (2, hangs_again),
    "sidecar says 503": (1, lambda draw: setattr(draw.engine, "says_503_until", draw.until(3.0, 12.0, 60.0))),
    "dead for a moment": (2, dead_for_a_moment),
    "old page": (1, old_page),
    "overload": (1, lambda draw: setattr(draw.engine, "overload_until", draw.until(20.0, 90.0, 200.0))),
    "start fails": (1, start_fails),
    "stop fails": (1, stop_fails),
    "way is cut": (3, way_is_cut),
    "way is bad": (2, way_is_bad),
    "lock is away": (1, lambda draw: draw.for_a_while(draw.world.network.link(draw.host.name, "lock"), "is_cut")),
    "balancer is silent": (1, lambda draw: draw.for_a_while(draw.world.proxy, "is_down")),
    "balancer reloads": (1, balancer_reloads),
    "balancer is cut": (1, balancer_is_cut),
    "supervisor is silent": (1, lambda draw: draw.for_a_while(draw.world.supervisors[draw.engine.name], "is_silent")),
    "guard is killed": (3, guard_is_killed),
    "guard is frozen": (1, guard_is_frozen),
    "guard is stopped": (1, guard_is_stopped),
    "disk is full": (1, lambda draw: draw.for_a_while(draw.host.disk, "is_full")),
    "disk is slow": (1, disk_is_slow),
    "clock jumps": (1, clock_jumps),
    "operator stops": (1, operator_stops),
    "operator starts": (1, operator_starts),
    "operator pauses engine": (1, operator_pauses_engine),
    "operator maintains": (1, operator_maintains),
    "operator rolls out": (0.5, operator_rolls_out),
    "operator restarts": (3, lambda draw: by_guardctl(draw, "restart")),
    "operator drains": (1, operator_drains),
    "operator pauses guard": (1, operator_pauses_guard),
}


def supervisor_restarts(draw: Draw) -> None:
    """From now on it starts what crashed by itself, as systemd and Docker do."""
    draw.world.supervisors[draw.engine.name].again_s = draw.any_of(1.0, 3.0, 10.0)
    draw.engine.die("crash")


def crashes_again_and_again(draw: Draw, times: int = 6) -> None:
    draw.world.supervisors[draw.engine.name].again_s = 3.0
    draw.engine.die("crash")
    if times:
        draw.world.later(draw.any_of(25.0, 70.0), crashes_again_and_again, draw, times - 1)


def clock_is_set_often(draw: Draw, times: int = 12) -> None:
    """Between two times, as two services that both keep it may do."""
    draw.host.ahead_s = draw.any_of(90.0, 3_600.0, -3_600.0) if times % 2 else 0.0
    draw.host.jumps += 1
    if times:
        draw.world.later(draw.any_of(7.0, 30.0), clock_is_set_often, draw, times - 1)


RARE: dict[str, tuple[float, Callable[[Draw], None]]] = {
    "supervisor restarts it": (1, supervisor_restarts),
    "crashes again and again": (1, crashes_again_and_again),
    "supervisor hangs": (1, lambda draw: draw.for_a_while(draw.world.supervisors[draw.engine.name], "hangs", 15.0, 60.0)),
    "supervisor's answers change": (
        1, lambda draw: draw.for_a_while(draw.world.supervisors[draw.engine.name], "flaps", 60.0, 200.0, 400.0),
    ),
    "clock is set again and again": (1, clock_is_set_often),
}  # fmt: skip
"""Added to every third story: drawn among the others they would change what each seed means."""


def draw_faults(world: World) -> list[Fault]:
    """Some faults, alone or close together."""
    dice = world.dice("faults")
    weights = [weight for weight, _ in FAULTS.values()]
    faults: list[Fault] = []
    at_s = CALM_S
    for _ in range(dice.choice((1, 2, 3, 4, 6))):
        at_s = min(CALM_S + TROUBLE_S, at_s + dice.choice((0.0, 1.0, 3.0, 10.0, 30.0, 60.0)))
        name = dice.choices(list(FAULTS), weights)[0]
        draw = Draw(world, random.Random(dice.random()))
        faults.append(scripted(at_s, name, draw))
    dice = world.dice("rare faults")
    if dice.random() < 1 / 3:
        draw = Draw(world, random.Random(dice.random()))
        faults.append(scripted(CALM_S + dice.uniform(0.0, TROUBLE_S), dice.choice(list(RARE)), draw))
    dice = world.dice("crashes later")
    if dice.random() < 1 / 30:  # each is mended before the next one: only the budget ends that
        draw = Draw(world, random.Random(dice.random()))
        gap_s = dice.uniform(150.0, 220.0)
        faults += [scripted(CALM_S + place * gap_s, "crash", draw) for place in range(dice.choice((2, 2, 3)))]
    return faults


def scripted(at_s: float, name: str, draw: Draw) -> Fault:
    who = draw.host.name if any(word in name for word in ("guard", "disk", "clock", "way", "lock")) else draw.engine.name
    return at_s, f"{who}: {name}", lambda: (FAULTS | RARE)[name][1](draw)
