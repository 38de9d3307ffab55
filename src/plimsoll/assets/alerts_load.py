"""Alerts about load and memory: an engine that has more to do than it can, recomputes, or runs out of memory."""

from __future__ import annotations

from plimsoll.assets.alert import Alert, Case, Group, Needs, Record, Severity, Thresholds
from plimsoll.assets.names import ENGINE_LABELS, Names, span
from plimsoll.units import GIB, MIB

WAIT = "plimsoll:expected_wait:seconds"
WAITING_2M, WAITING_8M = "plimsoll:waiting:avg_2m", "plimsoll:waiting:avg_8m"
TWICE = "plimsoll:done_twice:ratio_5m"
FREE_TOKENS = "plimsoll:kv_free:tokens"
LATE = "plimsoll:ttft:p95_10m"
HITS = "plimsoll:prefix_hits:ratio_30m"
BY_ENGINE = f"by ({', '.join(ENGINE_LABELS)}"


def load_alerts(names: Names, bounds: Thresholds) -> Group:
    """Alerts about queues, preemptions, latency and the prefix cache, with their recording rules."""
    return Group(
        "vllm-load",
        load_records(names, bounds),
        (
            _saturation(names, bounds),
            _preemption_storm(names, bounds),
            _full_cache(names, bounds),
            _late_first_token(names, bounds),
            _idle_prefix_cache(names, bounds),
        ),
    )


def load_records(names: Names, bounds: Thresholds) -> tuple[Record, ...]:
    """Recording rules of the load alerts and panels."""
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


def _saturation(names: Names, bounds: Thresholds) -> Alert:
    queue = _grows(names, bounds)
    return Alert(
        "VllmSaturated", Severity.PAGE, "engine.saturated", Needs.VLLM, for_s=180, by=("engine", "model_name"),
        expr=f"{names.of(WAIT)} > {bounds.wait_s:g}\nand {_queue(names, bounds)}\nand ({_rises(names, bounds)})",
        summary="{{ $labels.instance }}: a new request waits too long, and the queue grows",
        description="A request of {{ $labels.model_name }} that comes now waits {{ $value | humanizeDuration }} for its first "
        f"token; {bounds.wait_s:g} s were promised. The queue has grown from stretch to stretch of two or of eight minutes.",
        means="More comes than it can do, so every new request waits longer than the one before. Send less here or add an "
        "engine; guard sheds if it may (`guardctl status`). A restart loses what runs and changes nothing else.",
        cases=(
            Case("three times as much as it can do", shape="overload", fires="17m 29m", silent="10m 13m"),
            Case("a queue that grows and grows, whatever was promised", fires="18m 29m", silent="10m 14m", series=queue),
            Case("a queue that came at once and drains", silent="13m 15m 18m",
                series=names.page(waiting="0x39 90-1x80", running="32x119", success="0+8x119")),
            Case("a long queue that does not grow", silent="15m 25m",
                series=names.page(waiting="200x119", running="32x119", success="0+8x119")),
            Case("a queue that grows by little", silent="20m 29m",
                series=names.page(waiting="400+1x119", running="32x119", success="0+8x119")),
            Case("a queue that came in two jumps and stays", silent="13m 19m 22m 25m 29m",
                series=names.page(waiting="8x39 60x31 300x47", running="32x119", success="0+8x119")),
            Case("many more run than wait: a few at the door of a large server", silent="20m 22m",
                series={**_grows(names, bounds), **names.page(running="4000x119")}),
            Case("nothing has ended for minutes: how long one would wait is not known", silent="20m 22m",
                series={**queue, **names.page(success="7x119")}),
            Case("its gate reckons with less: it knows the lengths", silent="20m 22m",
                series={**queue, **names.page(expected_wait=f"{bounds.wait_s / 2}x119")}),
            Case("two bursts", shape="burst", silent="11m 13m 22m"),
            Case("an idle night", shape="night", silent="1h 3h 3h20m"),
        ),
    )  # fmt: skip


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
    return names.page(waiting="8x39 8+5x79", running="32x119", success=success)


def _preemption_storm(names: Names, bounds: Thresholds) -> Alert:
    preempted = f"increase({names.vllm('preemptions')}[5m])"
    return Alert(
        "VllmPreemptionStorm", Severity.TICKET, "kv.preemption-storm", Needs.VLLM, for_s=30, by=("engine", "model_name"),
        expr=f"{names.of(TWICE)} >= {bounds.storm_share:g}\nand {preempted} >= {bounds.storm_least}",
        summary="{{ $labels.instance }} computes requests again and again",
        description="Up to {{ $value | humanizePercentage }} of the tokens of the last five minutes were recomputed: the KV "
        "cache is too short for what runs at once.",
        means="Nothing fails; everything takes longer than it need. Fewer at once get more done: lower `--max-num-seqs` to "
        "what the pool holds, at the next restart. Restarting it as it is brings the same storm back.",
        cases=(
            Case("long answers overfill the pool", shape="storm", fires="10m30s 29m", silent="9m"),
            Case("it lasts for less than half a minute at this bound", silent="5m 10m",
                series=names.page(preemptions="0x19 12x0 12x79", success="0x19 100x0 4000+100x79")),
            Case("a few preemptions on a small server", silent="11m 14m",
                series=names.page(preemptions="0x39 8x79", success="0+2x119")),
            Case("many preemptions among very many requests", silent="15m 25m",
                series=names.page(preemptions="0+2x119", success="0+100x119")),
            Case("no request has ended: how much was lost is not known", silent="15m 25m",
                series=names.page(preemptions="0+5x119", success="3x119")),
            Case("the counters begin anew", shape="reset", silent="11m 21m"),
            Case("an idle night", shape="night", silent="1h 3h 3h20m"),
        ),
    )  # fmt: skip


def _full_cache(names: Names, bounds: Thresholds) -> Alert:
    usage, tokens = names.vllm("kv_cache_usage"), bounds.full_tokens
    if tokens is None:
        full, says = f"{usage} >= {bounds.full:g}", f"{bounds.full:.0%} of the KV cache and more are in use"
    else:
        full = f"{names.of(FREE_TOKENS)} <= {tokens}"
        says = f"Fewer than {tokens:,} of the {bounds.kv_tokens:,} tokens that the plan gives this model are free"
    return Alert(
        "VllmCacheFull", Severity.TICKET, "kv.saturated", Needs.VLLM, for_s=180, by=("engine", "model_name"),
        expr=f"{full}\nand {_queue(names, bounds)}",
        summary="{{ $labels.instance }}: the KV cache is full and requests queue for it",
        description=f"{says}, and a queue waits for it.",
        means="The KV cache is what limits this server now. A full cache alone is a busy, healthy server; with a queue it is "
        "too small for this traffic: more engines, an fp8 cache, a shorter context. Emptying the prefix cache frees nothing.",
        cases=(
            Case("full, and sixty at the door", fires="14m", silent="9m 12m30s",
                series=names.page(kv_cache_usage="0.5x39 0.99x79", waiting="0x39 60x79", running="30x119")),
            Case("full with a few at the door", shape="full", silent="10m 20m 29m"),
            Case("full, and three at the door of a small server", silent="15m 25m",
                series=names.page(kv_cache_usage="0.99x119", waiting="3x119", running="8x119")),
            Case("full, and six at the door of a large server", silent="15m 25m",
                series=names.page(kv_cache_usage="0.99x119", waiting="6x119", running="200x119")),
            Case("room, and a queue: something else limits", silent="15m 25m",
                series=names.page(kv_cache_usage="0.6x119", waiting="60x119", running="30x119")),
            Case("two bursts", shape="burst", silent="11m 13m 22m"),
            Case("an idle night", shape="night", silent="1h 3h 3h20m"),
        ),
    )  # fmt: skip


def _late_first_token(names: Names, bounds: Thresholds) -> Alert:
    asked = f"sum {BY_ENGINE}) (increase({names.vllm('ttft', '_count')}[10m]))"
    return Alert(
        "VllmFirstTokenLate", Severity.TICKET, "engine.saturated", Needs.VLLM, for_s=600, by=("engine", "model_name"),
        expr=f"{names.of(LATE)} > {bounds.ttft_s:g}\nand {asked} >= 20",
        summary="{{ $labels.instance }} answers later than was promised",
        description="One request in twenty waits {{ $value | humanizeDuration }} or longer for its first token; "
        f"{bounds.ttft_s:g} s were promised.",
        means="The promise to users is broken for one in twenty. Long prompts, a queue or recomputed tokens: the dashboard "
        "shows which. A queue that grows is told on its own, and wakes somebody.",
        cases=(
            Case("a fifth of them is late", fires="12m 29m", silent="9m",
                series=first_tokens(names, bounds, in_time=12, late=3)),
            Case("one in fifty is late", silent="25m 29m", series=first_tokens(names, bounds, in_time=49, late=1)),
            Case("a handful at night, all of them late", silent="20m 29m",
                series=first_tokens(names, bounds, in_time=0, late=0.25)),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def first_tokens(names: Names, bounds: Thresholds, *, in_time: float, late: float) -> dict[str, str]:
    """First tokens within the promise and later ones, so many every 15 s."""
    buckets = {f"{bounds.ttft_s / 2:g}": in_time, f"{bounds.ttft_s:g}": in_time, f"{bounds.ttft_s * 4:g}": in_time + late}
    found: dict[str, str] = {}
    for edge, count in {**buckets, "+Inf": in_time + late}.items():
        found |= names.page(**{f"ttft_le_{edge}": _adds(count)})
    return found | names.page(ttft_count=_adds(in_time + late))


def _adds(each: float) -> str:
    return " ".join(f"{int(n * each)}" for n in range(120))


def _idle_prefix_cache(names: Names, bounds: Thresholds) -> Alert:
    looked_up = f"increase({names.vllm('prefix_queries')}[30m])"
    return Alert(
        "VllmPrefixCacheIdle", Severity.TICKET, "prefix-cache.low-hit-rate", Needs.VLLM, for_s=600, by=("engine", "model_name"),
        expr=f"{names.of(HITS)} < {bounds.prefix_share:g}\nand {looked_up} >= {bounds.prefix_least}",
        summary="{{ $labels.instance }} finds next to nothing in its prefix cache",
        description="{{ $value | humanizePercentage }} of the tokens looked up in the last half hour were found.",
        means="A matter of speed, never of memory: switching the cache off frees nothing. Prompts share no beginning, or the "
        "balancer spreads those that do over all engines.",
        cases=(
            Case("a million tokens and hardly a hit", fires="26m 59m", silent="20m",
                series=names.page(prefix_queries="0+20000x239", prefix_hits="0+100x239")),
            Case("half of them are found", silent="40m 59m",
                series=names.page(prefix_queries="0+20000x239", prefix_hits="0+10000x239")),
            Case("few tokens: too few to tell", silent="40m 59m",
                series=names.page(prefix_queries="0+500x239", prefix_hits="0x239")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


# Alerts about memory of the card and of the host, by the figures of plimsoll.inside's probe.

HELD = "plimsoll:held:bytes"
ROOM = "plimsoll:device_room:bytes"
HOST = "plimsoll:host_resident:bytes"
WORKER = ("engine", "worker")


def memory_alerts(names: Names, bounds: Thresholds) -> Group:
    """Alerts about the memory of the card and of the host, from the probe's metrics."""
    return Group(
        "vllm-memory",
        memory_records(names),
        (
            _allocation_retries(names, bounds),
            _nearly_full_card(names, bounds),
            _neighbour(names, bounds),
            _contained_failure(names, bounds),
            _gpu_memory_growth(names, bounds),
            _host_memory_growth(names, bounds),
        ),
    )


def memory_records(names: Names) -> tuple[Record, ...]:
    """Recording rules of the memory alerts and panels."""
    allocated, gaps = names.of("plimsoll_torch_allocated_bytes"), names.of("plimsoll_torch_unreleasable_bytes")
    free, releasable = names.of("plimsoll_device_free_bytes"), names.of("plimsoll_torch_releasable_bytes")
    workers, server = names.of("plimsoll_worker_resident_bytes"), names.of("process_resident_memory_bytes")
    return (
        Record(HELD, f"{allocated} + {gaps}"),
        Record(ROOM, f"{free} + {releasable}"),
        # Of all workers where there is a probe; else of the API server alone.
        Record(HOST, f"sum by (job, instance) ({workers})\nor {server}"),
    )


def _allocation_retries(names: Names, bounds: Thresholds) -> Alert:
    return Alert(
        "VllmAllocationsRetry", Severity.TICKET, "allocator.fragmentation", Needs.PROBE, for_s=0, by=WORKER,
        expr=f"increase({names.of('plimsoll_torch_num_alloc_retries_total')}[10m]) >= {bounds.retries_least}",
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: allocations fail at first",
        description="{{ $value | humanize }} allocations failed at first within ten minutes: torch gave its cache back and "
        "tried again.",
        means="The leading sign of running out of GPU memory: nothing has failed yet. Look at what is left on the card "
        "(dashboard, memory ledger) and who else is on it; plan more slack (`plimsoll plan`) for the next start.",
        cases=(
            Case("five within a minute", fires="11m30s 15m", silent="10m15s", series=names.page(retries="0x39 1+1x4 5x79")),
            Case("one, and one more an hour later", silent="15m 1h15m", series=names.page(retries="0x39 1x239 2x79")),
            Case("the counter begins anew", silent="13m 20m", series=names.page(retries="40x39 _x9 0x79")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _nearly_full_card(names: Names, bounds: Thresholds) -> Alert:
    enough, little = bounds.thin_bytes + 64 * MIB, max(0, bounds.thin_bytes // 2 - 1)
    return Alert(
        "VllmCardNearlyFull", Severity.TICKET, "gpu.thin-slack", Needs.PROBE, for_s=60, by=WORKER,
        expr=f"{names.of(ROOM)} < {bounds.thin_bytes}",
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: next to nothing of the card is left",
        description=f"{{{{ $value | humanize1024 }}}}B are free or could be given back; under {bounds.thin_bytes // MIB} MiB "
        "a step may fail.",
        means="The next large batch, image or log-probability request may kill the engine. Find out who else is on the card "
        "(nvidia-smi); else lower `--gpu-memory-utilization` by what is missing, at the next restart.",
        cases=(
            Case("another process took the rest", fires="11m30s 25m", silent="9m 10m30s",
                series=names.page(device_free=f"{enough}x39 {little}x79", releasable="0x119")),
            Case("nothing free, and much that torch would give back", silent="15m 25m",
                series=names.page(device_free="0x119", releasable=f"{enough}x119")),
            Case("for half a minute", silent="10m15s 10m45s 12m",
                series=names.page(device_free=f"{enough}x39 {little}x1 {enough}x77", releasable="0x119")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _neighbour(names: Names, bounds: Thresholds) -> Alert:
    others, free = names.of("plimsoll_device_used_by_others_bytes"), names.of("plimsoll_device_free_bytes")
    releasable = names.of("plimsoll_torch_releasable_bytes")
    came, room, unused = bounds.came_bytes * 2, bounds.free_bytes * 4, bounds.releasable_bytes * 2
    need = bounds.free_bytes // 2
    return Alert(
        "VllmNeighbourInNeed", Severity.TICKET, "runtime.neighbour", Needs.PROBE, for_s=30, by=WORKER,
        expr=f"{others} - min_over_time({others}[25m]) >= {bounds.came_bytes}\nand {free} < {bounds.free_bytes}\n"
        f"and {releasable} >= {bounds.releasable_bytes}",
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: another process needs the card's memory",
        description="Other processes took {{ $value | humanize1024 }}B within 25 minutes, little is free, and torch holds "
        "much that it does not use.",
        means="This engine shares its card, and its share was planned without the other. `plimsoll guardctl compact ENGINE` "
        "gives back what torch does not use, in milliseconds; then keep the other process off this card, or plan with "
        "`--used-gib`.",
        cases=(
            Case("one that came in the 20th minute", shape="neighbour", fires="20m30s 35m", silent="19m"),
            Case("one that was always there", silent="20m 50m",
                series=names.page(by_others=f"{came}x239", device_free=f"{need}x239", releasable=f"{unused}x239")),
            Case("one that came, with room for both", silent="26m 40m",
                series=names.page(by_others=f"0x99 {came}x139", device_free=f"{room}x239", releasable=f"{unused}x239")),
            Case("one that came, and torch holds nothing to give", silent="26m 40m",
                series=names.page(by_others=f"0x99 {came}x139", device_free=f"{need}x239", releasable=f"{MIB}x239")),
            Case("one that looks in for a moment", silent="25m15s 26m",
                series=names.page(by_others=f"0x99 {came}x1 0x137", device_free=f"{need}x239", releasable=f"{unused}x239")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _contained_failure(names: Names, bounds: Thresholds) -> Alert:
    over = span(bounds.contained_s)
    count, limps = names.of("plimsoll_survive_contained_total"), names.of("plimsoll_survive_limping")
    last, after = bounds.contained_s // 15 + 38, bounds.contained_s // 15 + 44  # samples, with the failure in the 40th
    return Alert(
        "VllmFailureContained", Severity.TICKET, "runtime.contained", Needs.GATE, for_s=0,
        expr=f"increase({count}[{over}]) > 0\nor {limps} == 1\nor {names.of('plimsoll_survive_storm')} == 1",
        summary="{{ $labels.instance }}: a step ran out of GPU memory, and the engine lives",
        description=f"A step ran out of device memory within {over} and was contained, or the engine limps since, or it "
        "happens again and again.",
        means="Nobody was lost: the step's requests were computed again, in smaller steps. The next one may not be contained. "
        "`plimsoll doctor LOG` names the site and the flag that makes it impossible; one that limps or storms is drained and "
        "restarted (guard does it where it may act).",
        cases=(
            Case("one contained failure", fires=f"10m30s {last * 15}s", silent=f"9m30s {after * 15}s",
                series=names.page(contained=f"0x39 1x{after + 40}")),
            Case("it limps, long after the last of them", fires="10m30s 25m", silent="9m30s",
                series=names.page(contained="3x119", limping="0x39 1x79", storm="0x119")),
            Case("it says that it should be restarted", fires="10m30s 25m", silent="9m30s",
                series=names.page(contained="30x119", limping="0x119", storm="0x39 1x79")),
            Case("three long ago", silent="5m 29m", series=names.page(contained="3x119", limping="0x119", storm="0x119")),
            Case("the counter begins anew", silent="13m 20m", series=names.page(contained="5x39 _x9 0x79")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _lows(series: str, least: int) -> str:
    """The lowest of each of three stretches of two hours, each by half of it above the one before, and still rising.

    A plateau is no growth, and neither is growth that has ended.
    """
    last, middle, first = (f"min_over_time({series}[2h]{offset})" for offset in ("", " offset 2h", " offset 4h"))
    now, before = (f"min_over_time({series}[1h]{offset})" for offset in ("", " offset 1h"))
    return f"{last} - {middle} > {least // 2}\nand {middle} - {first} > {least // 2}\nand {now} - {before} > {least // 8}"


def _gpu_memory_growth(names: Names, bounds: Thresholds) -> Alert:
    half = bounds.growth_bytes
    return Alert(
        "VllmGpuMemoryGrows", Severity.TICKET, "gpu.growth", Needs.PROBE, for_s=1_800, by=WORKER,
        expr=_lows(names.of(HELD), bounds.growth_bytes),
        summary="{{ $labels.instance }}, worker {{ $labels.worker }}: GPU memory grows and is not given back",
        description="What torch holds and cannot give back was {{ $value | humanize1024 }}B higher in the last two hours than "
        "in the two before, and higher there than before that.",
        means="A leak, slow enough for the day. Guard says when the card is full (`guardctl status`); drain and restart this "
        "engine before that. Growth to a plateau at the longest prompt seen is normal, and is not told.",
        cases=(
            Case("a leak of 108 MiB an hour", shape="growth", every_s=300, fires="7h 7h45m", silent="2h 6h30m"),
            Case("a staircase to a plateau", shape="staircase", every_s=300, silent="5h 7h45m"),
            Case("one step up, and no more", every_s=300, silent="5h 7h45m",
                series=names.page(allocated=f"{20 * GIB}x47 {20 * GIB + 3 * half}x47", unreleasable="0x95")),
            Case("growth that ended two hours ago", every_s=300, silent="7h45m",
                series=names.page(allocated=f"{20 * GIB}+{half // 8}x60 {20 * GIB + half // 8 * 60}x34", unreleasable="0x95")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip


def _host_memory_growth(names: Names, bounds: Thresholds) -> Alert:
    half = bounds.host_growth_bytes
    return Alert(
        "VllmHostMemoryGrows", Severity.TICKET, "host.growth", Needs.VLLM, for_s=1_800,
        expr=_lows(names.of(HOST), bounds.host_growth_bytes),
        summary="{{ $labels.instance }}: host memory grows",
        description="It was {{ $value | humanize1024 }}B higher in the last two hours than in the two before, and higher "
        "there than before.",
        means="At its end the kernel kills a process and the log says nothing. Compare with the container's limit (`plimsoll "
        "guardctl status ENGINE` has a forecast) and restart this engine, drained, before that.",
        cases=(
            Case("a leak of 900 MiB an hour", shape="host-growth", every_s=300, fires="5h50m 7h45m", silent="2h 5h20m"),
            Case("the API server leaks, and there is no probe", every_s=300, fires="7h45m", silent="3h",
                series=names.page(resident=f"{GIB}+{half // 8}x95")),
            Case("one step up, and no more", every_s=300, silent="5h 7h45m",
                series=names.page(worker_resident=f"{3 * GIB}x47 {3 * GIB + 3 * half}x47")),
            Case("growth that ended two hours ago", every_s=300, silent="7h45m",
                series=names.page(worker_resident=f"{3 * GIB}+{half // 8}x60 {3 * GIB + half // 8 * 60}x34")),
            Case("an idle night", shape="night", silent="1h 3h"),
        ),
    )  # fmt: skip
