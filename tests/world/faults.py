"""Faults, and operators who act: what a seed may bring, each with its time."""

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

Fault = tuple[float, str, Callable[[], None]]


class Draw:
    """One drawing: the dice, and whom it is about."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world, self.dice = world, dice
        self.engine: Engine = dice.choice(world.engines)
        self.host: Host = dice.choice(world.hosts)

    def for_a_while(self, begin: Callable[[], None], end: Callable[[], None], seconds: float | None = None) -> None:
        begin()
        seconds = self.dice.choice((5.0, 15.0, 40.0, 120.0)) if seconds is None else seconds
        self.world.later(seconds, end)


def crash(draw: Draw) -> None:
    draw.engine.die("crash")


def core_dies(draw: Draw) -> None:
    draw.engine.become(Core.DEAD, draw.dice.choice((0.0, 3.0, 30.0)))


def core_hangs(draw: Draw) -> None:
    draw.engine.become(Core.HANGS)


def hangs_again(draw: Draw) -> None:
    """A hang that ends by itself, and then one that does not."""
    draw.engine.become(Core.CALLS, draw.dice.choice((50.0, 100.0)))
    draw.world.later(draw.dice.choice((110.0, 140.0)), draw.engine.become, Core.HANGS)


def long_call(draw: Draw) -> None:
    draw.engine.become(Core.CALLS, draw.dice.choice((30.0, 100.0)))


def says_503(draw: Draw) -> None:
    draw.engine.says_503_until = draw.world.loop.now + draw.dice.choice((3.0, 12.0, 60.0))


def core_dead_for_a_moment(draw: Draw) -> None:
    """/health says 503 and is well again."""
    engine, life = draw.engine, draw.engine.life
    if engine.core is not Core.WORKS:
        return
    draw.for_a_while(
        lambda: engine.become(Core.DEAD),
        lambda: engine.become(Core.WORKS) if engine.life == life else None,
        draw.dice.choice((8.0, 12.0, 16.0, 20.0)),
    )


def old_page(draw: Draw) -> None:
    draw.engine.old_page_until = draw.world.loop.now + draw.dice.choice((30.0, 150.0, 300.0))


def overload(draw: Draw) -> None:
    draw.engine.overload_until = draw.world.loop.now + draw.dice.choice((20.0, 90.0, 200.0))


def start_fails(draw: Draw) -> None:
    draw.engine.starts_fail = draw.dice.choice((1, 2, 9))
    draw.engine.die("crash")


def stop_fails(draw: Draw) -> None:
    draw.world.supervisors[draw.engine.name].stop_fails = draw.dice.choice((1, 2))
    draw.engine.become(Core.HANGS)


def way_is_cut(draw: Draw) -> None:
    """A guard's own way to one engine, or to all."""
    engines = draw.world.engines if draw.dice.random() < 0.5 else [draw.engine]
    links = [draw.world.network.link(draw.host.name, one.name) for one in engines]
    for link in links:
        link.rejects = draw.dice.random() < 0.5

    def cut(is_cut: bool) -> None:
        for link in links:
            link.is_cut = is_cut

    draw.for_a_while(lambda: cut(True), lambda: cut(False), draw.dice.choice((20.0, 100.0, 300.0)))


def way_is_bad(draw: Draw) -> None:
    for engine in draw.world.engines:
        link = draw.world.network.link(draw.host.name, engine.name)
        link.loss, link.delay_s = draw.dice.choice((0.0, 0.1, 0.4)), draw.dice.choice((0.0, 0.5, 4.0, 12.0))
        link.twice = draw.dice.choice((0.0, 0.5))


def lock_is_away(draw: Draw) -> None:
    link = draw.world.network.link(draw.host.name, "lock")
    draw.for_a_while(lambda: setattr(link, "is_cut", True), lambda: setattr(link, "is_cut", False))


def balancer_is_silent(draw: Draw) -> None:
    proxy = draw.world.proxy
    draw.for_a_while(lambda: setattr(proxy, "is_down", True), lambda: setattr(proxy, "is_down", False))


def balancer_is_cut(draw: Draw) -> None:
    """From one engine: guard still sees that."""
    cut, name = draw.world.proxy.cut, draw.engine.name
    draw.for_a_while(lambda: cut.add(name), lambda: cut.discard(name))


def balancer_reloads(draw: Draw) -> None:
    """It forgets what it was told."""
    for name, admin in draw.world.proxy.admin.items():
        draw.world.proxy.admin[name] = admin & FORCED_MAINT


def supervisor_is_silent(draw: Draw) -> None:
    one = draw.world.supervisors[draw.engine.name]
    draw.for_a_while(lambda: setattr(one, "is_silent", True), lambda: setattr(one, "is_silent", False))


def guard_is_killed(draw: Draw) -> None:
    draw.host.life.dies_at = draw.host.life.moments + 1 + int(draw.dice.expovariate(1 / 60.0))


def guard_is_frozen(draw: Draw) -> None:
    life = draw.host.life
    draw.for_a_while(lambda: setattr(life, "is_frozen", True), lambda: draw.world.loop.thaw(life))


def guard_is_stopped(draw: Draw) -> None:
    """By SIGTERM; its service manager starts it again."""
    handler = next(iter(draw.host.life.signals.values()), None)
    if handler is not None and not draw.host.life.is_dead:
        handler()


def disk_is_full(draw: Draw) -> None:
    disk = draw.host.disk
    draw.for_a_while(lambda: setattr(disk, "is_full", True), lambda: setattr(disk, "is_full", False))


def disk_is_slow(draw: Draw) -> None:
    disk = draw.host.disk
    disk.slow_s = draw.dice.choice((0.5, 4.0, 20.0))
    draw.world.later(60.0, setattr, disk, "slow_s", 0.0)


def clock_jumps(draw: Draw) -> None:
    jump_s = draw.dice.choice((-3_600.0, -30.0, 30.0, 7_200.0, 3.2e7))
    draw.host.ahead_s += jump_s
    draw.host.jumps += jump_s > 0
    if draw.dice.random() < 0.5:
        draw.world.later(60.0, lambda: setattr(draw.host, "ahead_s", 0.0))


# Operators


def operator_stops(draw: Draw) -> None:
    """By the supervisor; where that can tell, guard must leave it."""
    if draw.world.setting.knows_how and draw.engine.is_up:
        draw.world.left_alone[draw.engine.name] = draw.world.loop.now
    draw.engine.die("by hand")


def operator_starts(draw: Draw) -> None:
    draw.world.left_alone.pop(draw.engine.name, None)
    draw.engine.start("an operator")


def operator_pauses_engine(draw: Draw) -> None:
    engine, life = draw.engine, draw.engine.life

    def resume() -> None:
        if engine.life == life and engine.is_paused:
            engine.is_paused = False
            engine.go_on()

    draw.for_a_while(lambda: setattr(engine, "is_paused", True), resume, draw.dice.choice((60.0, 200.0)))


def operator_maintains(draw: Draw) -> None:
    """Maintenance in the balancer, and its end."""
    if draw.world.setting.balancer != "haproxy":
        return
    name, admin = draw.engine.name, draw.world.proxy.admin

    def begin() -> None:
        admin[name] = admin.get(name, 0) | FORCED_MAINT
        draw.world.left_alone[name] = draw.world.loop.now

    def end() -> None:
        admin[name] = admin.get(name, 0) & ~FORCED_MAINT
        draw.world.left_alone.pop(name, None)

    draw.for_a_while(begin, end, draw.dice.choice((60.0, 200.0)))


def operator_rolls_out(draw: Draw) -> None:
    """Another release, one engine after the other, without asking guard."""
    for place, engine in enumerate(draw.world.engines):

        def again(engine: Engine = engine) -> None:
            engine.version = "0.33.0"
            engine.die("by hand")
            draw.world.later(2.0, engine.start, "a rollout")

        draw.world.later(100.0 * place, again)


def _by_guardctl(draw: Draw, verb: str) -> None:
    """As guardctl: a request to one guard's API."""
    host, engine = draw.host, draw.engine.name
    if host.guard is None or host.life.is_dead or host.guard.desk is None:
        return
    desk = host.guard.desk

    async def ask() -> None:
        try:
            if verb in ("pause", "resume"):
                desk.switch("", "", is_paused=verb == "pause")
                host.paused_at = draw.world.loop.now
            elif verb == "drain":
                await desk.drain(engine)
            elif verb == "undrain":
                await desk.undrain(engine)
            else:
                await desk.ask(Grade.RESTART, engine)
        except Exception as problem:
            draw.world.note(f"guardctl {verb}: {problem}")

    if verb in ("restart", "drain"):
        draw.world.asked[engine] = draw.world.loop.now
    draw.world.loop.begin(host.life, ask())


def operator_restarts(draw: Draw) -> None:
    _by_guardctl(draw, "restart")


def operator_drains(draw: Draw) -> None:
    _by_guardctl(draw, "drain")
    draw.world.later(draw.dice.choice((10.0, 60.0)), _by_guardctl, draw, "undrain")


def operator_pauses_guard(draw: Draw) -> None:
    for host in draw.world.hosts:
        other = Draw(draw.world, draw.dice)
        other.host = host
        _by_guardctl(other, "pause")


FAULTS: dict[Callable[[Draw], None], float] = {
    crash: 3, core_dies: 3, core_hangs: 3, long_call: 1, hangs_again: 2, says_503: 1, core_dead_for_a_moment: 2,
    old_page: 1, overload: 1,
    start_fails: 1, stop_fails: 1, way_is_cut: 3, way_is_bad: 2, lock_is_away: 1, balancer_is_silent: 1,
    balancer_reloads: 1, balancer_is_cut: 1,
    supervisor_is_silent: 1, guard_is_killed: 3, guard_is_frozen: 1, guard_is_stopped: 1, disk_is_full: 1, disk_is_slow: 1,
    clock_jumps: 1, operator_stops: 1, operator_starts: 1, operator_pauses_engine: 1, operator_maintains: 1,
    operator_rolls_out: 0.5, operator_restarts: 3, operator_drains: 1, operator_pauses_guard: 1,
}  # fmt: skip


def draw_faults(world: World) -> list[Fault]:
    """Some faults, alone or close together."""
    from tests.world.world import CALM_S, TROUBLE_S

    dice = world.dice("faults")
    faults: list[Fault] = []
    at_s = CALM_S
    for _ in range(dice.choice((1, 2, 3, 4, 6))):
        at_s = min(CALM_S + TROUBLE_S, at_s + dice.choice((0.0, 1.0, 3.0, 10.0, 30.0, 60.0)))
        fault = dice.choices(list(FAULTS), list(FAULTS.values()))[0]
        draw = Draw(world, random.Random(dice.random()))
        who = f"{draw.host.name}, " if "guard" in fault.__name__ else f"{draw.engine.name}, "
        faults.append((at_s, f"{who}{fault.__name__.replace('_', ' ')}", lambda fault=fault, draw=draw: fault(draw)))  # type: ignore[misc]
    return faults
