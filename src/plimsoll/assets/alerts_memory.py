"""Alerts about memory of the card and of the host, by the figures of plimsoll.inside's probe."""

from __future__ import annotations

from plimsoll.assets.alert import Alert, Case, Group, Needs, Record, Severity
from plimsoll.assets.cases import here, page_of
from plimsoll.assets.names import Names, span
from plimsoll.assets.thresholds import Thresholds
from plimsoll.domain.units import GIB, MIB

HELD = "plimsoll:held:bytes"
ROOM = "plimsoll:device_room:bytes"
HOST = "plimsoll:host_resident:bytes"
WORKER = ("engine", "worker")


def memory(names: Names, bounds: Thresholds) -> Group:
    """All of them."""
    return Group(
        "vllm-memory",
        records(names),
        (
            _retries(names, bounds),
            _thin(names, bounds),
            _neighbour(names, bounds),
            _contained(names, bounds),
            _growth(names, bounds),
            _host_growth(names, bounds),
        ),
    )


def records(names: Names) -> tuple[Record, ...]:
    """What is asked more than once."""
    allocated, gaps = names.of("plimsoll_torch_allocated_bytes"), names.of("plimsoll_torch_unreleasable_bytes")
    free, releasable = names.of("plimsoll_device_free_bytes"), names.of("plimsoll_torch_releasable_bytes")
    workers, server = names.of("plimsoll_worker_resident_bytes"), names.of("process_resident_memory_bytes")
    return (
        Record(HELD, f"{allocated} + {gaps}"),
        Record(ROOM, f"{free} + {releasable}"),
        # Of all workers where there is a probe; else of the API server alone.
        Record(HOST, f"sum by (job, instance) ({workers})\nor {server}"),
    )


def _retries(names: Names, bounds: Thresholds) -> Alert:
    return Alert(
        name="VllmAllocationsRetry",
        severity=Severity.TICKET,
        code="allocator.fragmentation",
        expr=f"increase({names.of('plimsoll_torch_num_alloc_retries_total')}[10m]) >= {bounds.retries_least}",
        for_s=0,
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: allocations fail at first",
        description="{{ $value | humanize }} allocations failed at first within ten minutes: torch gave its "
        "cache back and tried again.",
        means="The leading sign of running out of GPU memory: nothing has failed yet. Look at what is left on "
        "the card (dashboard, "
        "memory ledger) and who else is on it; plan more slack (`plimsoll plan`) for the next start.",
        needs=(Needs.PROBE,),
        cases=(
            Case(
                "five within a minute",
                series=page_of(names, retries="0x39 1+1x4 5x79"),
                silent=("10m15s",),
                fires=("11m30s", "15m"),
                labels=(here(names, *WORKER),),
            ),
            Case("one, and one more an hour later", series=page_of(names, retries="0x39 1x239 2x79"), silent=("15m", "1h15m")),
            Case("the counter begins anew", series=page_of(names, retries="40x39 _x9 0x79"), silent=("13m", "20m")),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _thin(names: Names, bounds: Thresholds) -> Alert:
    enough, little = bounds.thin_bytes + 64 * MIB, max(0, bounds.thin_bytes // 2 - 1)
    return Alert(
        name="VllmCardNearlyFull",
        severity=Severity.TICKET,
        code="gpu.thin-slack",
        expr=f"{names.of(ROOM)} < {bounds.thin_bytes}",
        for_s=60,
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: next to nothing of the card is left",
        description=f"{{{{ $value | humanize1024 }}}}B are free or could be given back; under "
        f"{bounds.thin_bytes // MIB} MiB a step may fail.",
        means="The next large batch, image or log-probability request may kill the engine. Find out who else is on the card "
        "(nvidia-smi); else lower `--gpu-memory-utilization` by what is missing, at the next restart.",
        needs=(Needs.PROBE,),
        cases=(
            Case(
                "another process took the rest",
                series=page_of(names, device_free=f"{enough}x39 {little}x79", releasable="0x119"),
                silent=("9m", "10m30s"),
                fires=("11m30s", "25m"),
                labels=(here(names, *WORKER),),
            ),
            Case(
                "nothing free, and much that torch would give back",
                series=page_of(names, device_free="0x119", releasable=f"{enough}x119"),
                silent=("15m", "25m"),
            ),
            Case(
                "for half a minute",
                series=page_of(names, device_free=f"{enough}x39 {little}x1 {enough}x77", releasable="0x119"),
                silent=("10m15s", "10m45s", "12m"),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _neighbour(names: Names, bounds: Thresholds) -> Alert:
    others, free = names.of("plimsoll_device_used_by_others_bytes"), names.of("plimsoll_device_free_bytes")
    releasable = names.of("plimsoll_torch_releasable_bytes")
    came, room, unused = bounds.came_bytes * 2, bounds.free_bytes * 4, bounds.releasable_bytes * 2
    need = bounds.free_bytes // 2
    return Alert(
        name="VllmNeighbourInNeed",
        severity=Severity.TICKET,
        code="runtime.neighbour",
        expr=f"{others} - min_over_time({others}[25m]) >= {bounds.came_bytes}\n"
        f"and {free} < {bounds.free_bytes}\nand {releasable} >= {bounds.releasable_bytes}",
        for_s=30,
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: another process needs the card's memory",
        description="Other processes took {{ $value | humanize1024 }}B within 25 minutes, little is free, and "
        "torch holds much that it does "
        "not use.",
        means="This engine shares its card, and its share was planned without the other. `plimsoll guardctl "
        "compact ENGINE` gives "
        "back what torch does not use, in milliseconds; then keep the other process off this card, or plan with `--used-gib`.",
        needs=(Needs.PROBE,),
        cases=(
            Case(
                "one that came in the 20th minute",
                shape="neighbour",
                silent=("19m",),
                fires=("20m30s", "35m"),
                labels=(here(names, *WORKER),),
            ),
            Case(
                "one that was always there",
                series=page_of(names, by_others=f"{came}x239", device_free=f"{need}x239", releasable=f"{unused}x239"),
                silent=("20m", "50m"),
            ),
            Case(
                "one that came, with room for both",
                series=page_of(names, by_others=f"0x99 {came}x139", device_free=f"{room}x239", releasable=f"{unused}x239"),
                silent=("26m", "40m"),
            ),
            Case(
                "one that came, and torch holds nothing to give",
                series=page_of(names, by_others=f"0x99 {came}x139", device_free=f"{need}x239", releasable=f"{MIB}x239"),
                silent=("26m", "40m"),
            ),
            Case(
                "one that looks in for a moment",
                series=page_of(names, by_others=f"0x99 {came}x1 0x137", device_free=f"{need}x239", releasable=f"{unused}x239"),
                silent=("25m15s", "26m"),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _contained(names: Names, bounds: Thresholds) -> Alert:
    over = span(bounds.contained_s)
    count, limps = names.of("plimsoll_survive_contained_total"), names.of("plimsoll_survive_limping")
    last, after = bounds.contained_s // 15 + 38, bounds.contained_s // 15 + 44  # samples, with the failure in the 40th
    return Alert(
        name="VllmFailureContained",
        severity=Severity.TICKET,
        code="runtime.contained",
        expr=f"increase({count}[{over}]) > 0\nor {limps} == 1\nor {names.of('plimsoll_survive_storm')} == 1",
        for_s=0,
        summary="{{ $labels.instance }}: a step ran out of GPU memory, and the engine lives",
        description=f"A step ran out of device memory within {over} and was contained, or the engine limps since, or it "
        "happens again and again.",
        means="Nobody was lost: the step's requests were computed again, in smaller steps. The next one may not be contained. "
        "`plimsoll doctor LOG` names the site and the flag that makes it impossible; one that limps or storms is drained and "
        "restarted (guard does it where it may act).",
        needs=(Needs.GATE,),
        cases=(
            Case(
                "one contained failure",
                series=page_of(names, contained=f"0x39 1x{after + 40}"),
                silent=("9m30s", f"{after * 15}s"),
                fires=("10m30s", f"{last * 15}s"),
                labels=(here(names),),
            ),
            Case(
                "it limps, long after the last of them",
                series=page_of(names, contained="3x119", limping="0x39 1x79", storm="0x119"),
                silent=("9m30s",),
                fires=("10m30s", "25m"),
                labels=(here(names),),
            ),
            Case(
                "it says that it should be restarted",
                series=page_of(names, contained="30x119", limping="0x119", storm="0x39 1x79"),
                silent=("9m30s",),
                fires=("10m30s", "25m"),
                labels=(here(names),),
            ),
            Case(
                "three long ago", series=page_of(names, contained="3x119", limping="0x119", storm="0x119"), silent=("5m", "29m")
            ),
            Case("the counter begins anew", series=page_of(names, contained="5x39 _x9 0x79"), silent=("13m", "20m")),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _lows(series: str, least: int) -> str:
    """The lowest of each of three stretches of two hours, each by half of it above the one before, and still rising.

    A plateau is no growth, and neither is growth that has ended.
    """
    last, middle, first = (f"min_over_time({series}[2h]{offset})" for offset in ("", " offset 2h", " offset 4h"))
    now, before = (f"min_over_time({series}[1h]{offset})" for offset in ("", " offset 1h"))
    return f"{last} - {middle} > {least // 2}\nand {middle} - {first} > {least // 2}\nand {now} - {before} > {least // 8}"


def _growth(names: Names, bounds: Thresholds) -> Alert:
    half = bounds.growth_bytes
    return Alert(
        name="VllmGpuMemoryGrows",
        severity=Severity.TICKET,
        code="gpu.growth",
        expr=_lows(names.of(HELD), bounds.growth_bytes),
        for_s=1_800,
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: GPU memory grows and is not given back",
        description="What torch holds and cannot give back was {{ $value | humanize1024 }}B higher in the last "
        "two hours than in the two "
        "before, and higher there than before that.",
        means="A leak, slow enough for the day. Guard says when the card is full (`guardctl status`); drain and "
        "restart this engine "
        "before that. Growth to a plateau at the longest prompt seen is normal, and is not told.",
        needs=(Needs.PROBE,),
        cases=(
            Case(
                "a leak of 108 MiB an hour",
                shape="growth",
                every_s=300,
                silent=("2h", "6h30m"),
                fires=("7h", "7h45m"),
                labels=(here(names, *WORKER),),
            ),
            Case("a staircase to a plateau", shape="staircase", every_s=300, silent=("5h", "7h45m")),
            Case(
                "one step up, and no more",
                every_s=300,
                silent=("5h", "7h45m"),
                series=page_of(names, allocated=f"{20 * GIB}x47 {20 * GIB + 3 * half}x47", unreleasable="0x95"),
            ),
            Case(
                "growth that ended two hours ago",
                every_s=300,
                silent=("7h45m",),
                series=page_of(
                    names, allocated=f"{20 * GIB}+{half // 8}x60 {20 * GIB + half // 8 * 60}x34", unreleasable="0x95"
                ),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def _host_growth(names: Names, bounds: Thresholds) -> Alert:
    half = bounds.host_growth_bytes
    return Alert(
        name="VllmHostMemoryGrows",
        severity=Severity.TICKET,
        code="host.growth",
        expr=_lows(names.of(HOST), bounds.host_growth_bytes),
        for_s=1_800,
        summary="{{ $labels.instance }}: host memory grows",
        description="It was {{ $value | humanize1024 }}B higher in the last two hours than in the two before, "
        "and higher there than before.",
        means="At its end the kernel kills a process and the log says nothing. Compare with the container's limit "
        "(`plimsoll guardctl status ENGINE` has a forecast) and restart this engine, drained, before that.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "a leak of 900 MiB an hour",
                shape="host-growth",
                every_s=300,
                silent=("2h", "5h20m"),
                fires=("5h50m", "7h45m"),
                labels=(here(names),),
            ),
            Case(
                "the API server leaks, and there is no probe",
                every_s=300,
                silent=("3h",),
                fires=("7h45m",),
                series=page_of(names, resident=f"{GIB}+{half // 8}x95"),
                labels=(here(names),),
            ),
            Case(
                "one step up, and no more",
                every_s=300,
                silent=("5h", "7h45m"),
                series=page_of(names, worker_resident=f"{3 * GIB}x47 {3 * GIB + 3 * half}x47"),
            ),
            Case(
                "growth that ended two hours ago",
                every_s=300,
                silent=("7h45m",),
                series=page_of(names, worker_resident=f"{3 * GIB}+{half // 8}x60 {3 * GIB + half // 8 * 60}x34"),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )
