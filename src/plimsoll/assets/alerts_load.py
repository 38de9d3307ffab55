"""Alerts about an engine that has more to do than it can, or does it twice."""

from __future__ import annotations

from plimsoll.assets.alert import Alert, Case, Group, Needs, Record, Severity, Thresholds
from plimsoll.assets.cases import here, page_of
from plimsoll.assets.names import ENGINE_LABELS, Names, span
from plimsoll.units import GIB, MIB

WAIT = "plimsoll:expected_wait:seconds"
WAITING_2M, WAITING_8M = "plimsoll:waiting:avg_2m", "plimsoll:waiting:avg_8m"
TWICE = "plimsoll:done_twice:ratio_5m"
FREE_TOKENS = "plimsoll:kv_free:tokens"
LATE = "plimsoll:ttft:p95_10m"
HITS = "plimsoll:prefix_hits:ratio_30m"
BY_ENGINE = f"by ({', '.join(ENGINE_LABELS)}"


def load(names: Names, bounds: Thresholds) -> Group:
    """All of them."""
    return Group(
        "vllm-load",
        load_records(names, bounds),
        (
            _saturated(names, bounds),
            _storm(names, bounds),
            _backlog(names, bounds),
            _late(names, bounds),
            _prefix(names, bounds),
        ),
    )


def load_records(names: Names, bounds: Thresholds) -> tuple[Record, ...]:
    """What is asked more than once."""
    waiting, preempted = names.vllm("waiting"), f"increase({names.vllm('preemptions')}[5m])"
    ended = f"sum without (finished_reason) (increase({names.vllm('success')}[5m]))"
    rate = f"sum without (finished_reason) (rate({names.vllm('success')}[2m]))"
    gate = names.of("plimsoll_expected_wait_seconds")
    free = (
        () if bounds.kv_tokens is None else (Record(FREE_TOKENS, f"(1 - {names.vllm('kv_cache_usage')}) * {bounds.kv_tokens}"),)
    )
    return (
        # The gate's own figure where there is one; NaN, where it does not know, leads to nothing.
        Record(WAIT, f"({waiting} * 0 + on (job, instance) group_left () {gate})\nor {waiting} / ({rate} > 0)"),
        Record(WAITING_2M, f"avg_over_time({waiting}[2m])"),
        Record(WAITING_8M, f"avg_over_time({waiting}[8m])"),
        # Preemptions x mean length, as a share of all that was computed, comes down to this: see docs/monitoring.md.
        Record(TWICE, f"{preempted} / ({preempted} + ({ended} > 0))"),
        *free,
        Record(LATE, f"histogram_quantile(0.95, sum {BY_ENGINE}, le) (rate({names.vllm('ttft', '_bucket')}[10m])))"),
        Record(HITS, f"increase({names.vllm('prefix_hits')}[30m]) / (increase({names.vllm('prefix_queries')}[30m]) > 0)"),
    )


def _queue(names: Names, bounds: Thresholds) -> str:
    """More than the few that every busy server has at its door."""
    waiting, running = names.vllm("waiting"), names.vllm("running")
    return f"{waiting} > {bounds.queue_least}\nand {waiting} > {bounds.queue_share:g} * {running}"


def _saturated(names: Names, bounds: Thresholds) -> Alert:
    queue = _grows(names, bounds)
    return Alert(
        name="VllmSaturated",
        severity=Severity.PAGE,
        code="engine.saturated",
        expr=f"{names.of(WAIT)} > {bounds.wait_s:g}\nand {_queue(names, bounds)}\nand ({_rises(names, bounds)})",
        for_s=180,
        summary="{{ $labels.instance }}: a new request waits too long, and the queue grows",
        description=f"A request of {{{{ $labels.model_name }}}} that comes now waits "
        f"{{{{ $value | humanizeDuration }}}} for its first token; "
        f"{bounds.wait_s:g} s were promised. The queue has grown from stretch to stretch of two or of eight minutes.",
        means="More comes than it can do, so every new request waits longer than the one before. Send less here or add an "
        "engine; guard sheds if it may (`guardctl status`). A restart loses what runs and changes nothing else.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "three times as much as it can do",
                shape="overload",
                silent=("10m", "13m"),
                fires=("17m", "29m"),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case(
                "a queue that grows and grows, whatever was promised",
                series=queue,
                silent=("10m", "14m"),
                fires=("18m", "29m"),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case(
                "a queue that came at once and drains",
                series=page_of(names, waiting="0x39 90-1x80", running="32x119", success="0+8x119"),
                silent=("13m", "15m", "18m"),
            ),
            Case(
                "a long queue that does not grow",
                series=page_of(names, waiting="200x119", running="32x119", success="0+8x119"),
                silent=("15m", "25m"),
            ),
            Case(
                "a queue that grows by little",
                series=page_of(names, waiting="400+1x119", running="32x119", success="0+8x119"),
                silent=("20m", "29m"),
            ),
            Case(
                "a queue that came in two jumps and stays",
                series=page_of(names, waiting="8x39 60x31 300x47", running="32x119", success="0+8x119"),
                silent=("13m", "19m", "22m", "25m", "29m"),
            ),
            Case(
                "many more run than wait: a few at the door of a large server",
                series={**_grows(names, bounds), **page_of(names, running="4000x119")},
                silent=("20m", "22m"),
            ),
            Case(
                "nothing has ended for minutes: how long one would wait is not known",
                series={**queue, **page_of(names, success="7x119")},
                silent=("20m", "22m"),
            ),
            Case(
                "its gate reckons with less: it knows the lengths",
                series={**queue, **page_of(names, expected_wait=f"{bounds.wait_s / 2}x119")},
                silent=("20m", "22m"),
            ),
            Case("two bursts", shape="burst", silent=("11m", "13m", "22m")),
            Case("an idle night", shape="night", silent=("1h", "3h", "3h20m")),
        ),
    )


def _rises(names: Names, bounds: Thresholds) -> str:
    """From third to third by a tenth of the last: over six minutes, or over 24 and still in the last six.

    A jump is no growth: it lies in the middle third for two minutes, and the alert waits for three.
    """
    share = f"{bounds.rises:g}"
    last, middle, first = (names.of(WAITING_2M) + offset for offset in ("", " offset 2m", " offset 4m"))
    late, half, early = (names.of(WAITING_8M) + offset for offset in ("", " offset 8m", " offset 16m"))
    return (
        f"\n  ({last} - {middle} > {share} * {last}\n    and {middle} - {first} > {share} * {last})\n"
        f"  or ({late} - {half} > {share} * {late}\n    and {half} - {early} > {share} * {late}\n"
        f"    and {last} > {middle} and {middle} > {first})\n"
    )


def _grows(names: Names, bounds: Thresholds) -> dict[str, str]:
    """A queue that grows from the tenth minute on, to a wait far beyond the promise whatever that is.

    One request ends in as many seconds as the promise has: so the queue's length times that is the wait.
    """
    ends = 15.0 / max(bounds.wait_s, 0.1)
    success = " ".join(f"{n * ends:.3f}" for n in range(120))
    return page_of(names, waiting="8x39 8+5x79", running="32x119", success=success)


def _storm(names: Names, bounds: Thresholds) -> Alert:
    preempted = f"increase({names.vllm('preemptions')}[5m])"
    return Alert(
        name="VllmPreemptionStorm",
        severity=Severity.TICKET,
        code="kv.preemption-storm",
        expr=f"{names.of(TWICE)} >= {bounds.storm_share:g}\nand {preempted} >= {bounds.storm_least}",
        for_s=30,
        summary="{{ $labels.instance }} computes requests again and again",
        description="Up to {{ $value | humanizePercentage }} of the work of the last five minutes was done "
        "twice: the KV cache is too short "
        "for what runs at once.",
        means="Nothing fails; everything takes longer than it need. Fewer at once get more done: lower "
        "`--max-num-seqs` to what the "
        "pool holds, at the next restart. Restarting it as it is brings the same storm back.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "long answers overfill the pool",
                shape="storm",
                silent=("9m",),
                fires=("10m30s", "29m"),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case(
                "it lasts for less than half a minute at this bound",
                shape="",
                every_s=15,
                series=page_of(names, preemptions="0x19 12x0 12x79", success="0x19 100x0 4000+100x79"),
                silent=("5m", "10m"),
            ),
            Case(
                "a few preemptions on a small server",
                series=page_of(names, preemptions="0x39 8x79", success="0+2x119"),
                silent=("11m", "14m"),
            ),
            Case(
                "many preemptions among very many requests",
                series=page_of(names, preemptions="0+2x119", success="0+100x119"),
                silent=("15m", "25m"),
            ),
            Case(
                "no request has ended: how much was lost is not known",
                series=page_of(names, preemptions="0+5x119", success="3x119"),
                silent=("15m", "25m"),
            ),
            Case("the counters begin anew", shape="reset", silent=("11m", "21m")),
            Case("an idle night", shape="night", silent=("1h", "3h", "3h20m")),
        ),
    )


def _backlog(names: Names, bounds: Thresholds) -> Alert:
    usage, tokens = names.vllm("kv_cache_usage"), bounds.full_tokens
    if tokens is None:
        full, says = f"{usage} >= {bounds.full:g}", f"{bounds.full:.0%} of the KV cache and more are in use"
    else:
        full = f"{names.of(FREE_TOKENS)} <= {tokens}"
        says = f"Fewer than {tokens:,} of the {bounds.kv_tokens:,} tokens that the plan gives this model are free"
    return Alert(
        name="VllmCacheFull",
        severity=Severity.TICKET,
        code="kv.saturated",
        expr=f"{full}\nand {_queue(names, bounds)}",
        for_s=180,
        summary="{{ $labels.instance }}: the KV cache is full and requests queue for it",
        description=f"{says}, and a queue waits for it.",
        means="The KV cache is what limits this server now. A full cache alone is a busy, healthy server; with a "
        "queue it is too "
        "small for this traffic: more engines, an fp8 cache, a shorter context. Emptying the prefix cache frees nothing.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "full, and sixty at the door",
                series=page_of(names, kv_cache_usage="0.5x39 0.99x79", waiting="0x39 60x79", running="30x119"),
                silent=("9m", "12m30s"),
                fires=("14m",),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case("full with a few at the door", shape="full", silent=("10m", "20m", "29m")),
            Case(
                "full, and three at the door of a small server",
                series=page_of(names, kv_cache_usage="0.99x119", waiting="3x119", running="8x119"),
                silent=("15m", "25m"),
            ),
            Case(
                "full, and six at the door of a large server",
                series=page_of(names, kv_cache_usage="0.99x119", waiting="6x119", running="200x119"),
                silent=("15m", "25m"),
            ),
            Case(
                "room, and a queue: something else limits",
                series=page_of(names, kv_cache_usage="0.6x119", waiting="60x119", running="30x119"),
                silent=("15m", "25m"),
            ),
            Case("two bursts", shape="burst", silent=("11m", "13m", "22m")),
            Case("an idle night", shape="night", silent=("1h", "3h", "3h20m")),
        ),
    )


def _late(names: Names, bounds: Thresholds) -> Alert:
    asked = f"sum {BY_ENGINE}) (increase({names.vllm('ttft', '_count')}[10m]))"
    return Alert(
        name="VllmFirstTokenLate",
        severity=Severity.TICKET,
        code="engine.saturated",
        expr=f"{names.of(LATE)} > {bounds.ttft_s:g}\nand {asked} >= 20",
        for_s=600,
        summary="{{ $labels.instance }} answers later than was promised",
        description=f"One request in twenty waits {{{{ $value | humanizeDuration }}}} or longer for its first "
        f"token; {bounds.ttft_s:g} s "
        "were promised.",
        means="The promise to users is broken for one in twenty. Long prompts, a queue or work done twice: the "
        "dashboard shows which. "
        "A queue that grows is told on its own, and wakes somebody.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "a fifth of them is late",
                series=first_tokens(names, bounds, in_time=12, late=3),
                silent=("9m",),
                fires=("12m", "29m"),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case("one in fifty is late", series=first_tokens(names, bounds, in_time=49, late=1), silent=("25m", "29m")),
            Case(
                "a handful at night, all of them late",
                series=first_tokens(names, bounds, in_time=0, late=0.25),
                silent=("20m", "29m"),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


def first_tokens(names: Names, bounds: Thresholds, *, in_time: float, late: float) -> dict[str, str]:
    """So many in every 15 s within the promise, and so many later."""
    buckets = {f"{bounds.ttft_s / 2:g}": in_time, f"{bounds.ttft_s:g}": in_time, f"{bounds.ttft_s * 4:g}": in_time + late}
    found: dict[str, str] = {}
    for edge, count in {**buckets, "+Inf": in_time + late}.items():
        found |= page_of(names, **{f"ttft_le_{edge}": _adds(count)})
    return found | page_of(names, ttft_count=_adds(in_time + late))


def _adds(each: float) -> str:
    return " ".join(f"{int(n * each)}" for n in range(120))


def _prefix(names: Names, bounds: Thresholds) -> Alert:
    looked_up = f"increase({names.vllm('prefix_queries')}[30m])"
    return Alert(
        name="VllmPrefixCacheIdle",
        severity=Severity.TICKET,
        code="prefix-cache.low-hit-rate",
        expr=f"{names.of(HITS)} < {bounds.prefix_share:g}\nand {looked_up} >= {bounds.prefix_least}",
        for_s=600,
        summary="{{ $labels.instance }} finds next to nothing in its prefix cache",
        description="{{ $value | humanizePercentage }} of the tokens looked up in the last half hour were found.",
        means="A matter of speed, never of memory: switching the cache off frees nothing. Prompts share no "
        "beginning, or the balancer "
        "spreads those that do over all engines.",
        needs=(Needs.VLLM,),
        cases=(
            Case(
                "a million tokens and hardly a hit",
                series=page_of(names, prefix_queries="0+20000x239", prefix_hits="0+100x239"),
                silent=("20m",),
                fires=("26m", "59m"),
                labels=(here(names, "engine", "model_name"),),
            ),
            Case(
                "half of them are found",
                series=page_of(names, prefix_queries="0+20000x239", prefix_hits="0+10000x239"),
                silent=("40m", "59m"),
            ),
            Case(
                "few tokens: too few to tell",
                series=page_of(names, prefix_queries="0+500x239", prefix_hits="0x239"),
                silent=("40m", "59m"),
            ),
            Case("an idle night", shape="night", silent=("1h", "3h")),
        ),
    )


# Alerts about memory of the card and of the host, by the figures of plimsoll.inside's probe.

HELD = "plimsoll:held:bytes"
ROOM = "plimsoll:device_room:bytes"
HOST = "plimsoll:host_resident:bytes"
WORKER = ("engine", "worker")


def memory(names: Names, bounds: Thresholds) -> Group:
    """All of them."""
    return Group(
        "vllm-memory",
        memory_records(names),
        (
            _retries(names, bounds),
            _thin(names, bounds),
            _neighbour(names, bounds),
            _contained(names, bounds),
            _growth(names, bounds),
            _host_growth(names, bounds),
        ),
    )


def memory_records(names: Names) -> tuple[Record, ...]:
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
