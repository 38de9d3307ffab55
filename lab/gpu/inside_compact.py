"""The stages `compact` and `neighbour`: what giving memory back costs running streams, and whom it helps."""

from __future__ import annotations

import gzip
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

from lab.gpu.inside_bench import Bench, Kept
from lab.gpu.inside_server import MIB, Served, allocator, ask, ask_smi, read_gpu, workers
from lab.gpu.provoke_failures import FAILURE, Ballast, used_mib
from lab.paired import RAMP_S, alternate, compared
from lab.streams import Answer, Streams, failures, gaps, longest_gap_s, summary

WINDOW_S = 1.5  # from the moment compaction is asked for: a step of 16,384 tokens takes most of a second
CONTROL_WINDOWS = 200
COUNTERS = ("alloc_retries", "ooms", "reserved", "releasable", "allocated", "segments")
LEFT_FREE_MIB = 1024
NEIGHBOUR_SHARE = 0.7  # of what is releasable: the neighbour asks for all that is free and this much more
EVERY_S = 10.0


def compaction(server: Served) -> dict[str, Any]:
    """One compaction: when it was asked for, what it gave back, and what nvidia-smi saw."""
    before, asked = used_mib(), time.monotonic()
    status, said = ask(server.port, "POST", "/plimsoll/compact")
    answered = time.monotonic()
    after = used_mib()
    done = said.get("workers") if isinstance(said, dict) else None
    first = done[0] if done else {}
    return {
        "asked": asked, "answered_after_s": round(answered - asked, 4), "status": status, "said": said,
        "returned": first.get("returned"), "duration_s": first.get("duration_s"), "refused": first.get("refused"),
        "smi_before_mib": before, "smi_after_mib": after,
    }  # fmt: skip


def compact(bench: Bench, kept: Kept) -> None:
    """Streams all the while: some time without, twenty compactions, some time without again."""
    server, scale = bench.shared(), bench.scale
    middle_s = scale.compactions * scale.compact_every_s
    kept.put(flags=scale.flags, shape=scale.mixed._asdict(), window_s=WINDOW_S, before=_counters(server))
    with Streams(server.port, scale.model_name, scale.mixed, 60 + 2 * middle_s) as load:
        time.sleep(5)  # the first prompts all come at once
        marks = [time.monotonic()]
        time.sleep(middle_s / 2)
        marks.append(time.monotonic())
        kept.put(grown=_counters(server))
        for _ in range(scale.compactions):
            began = time.monotonic()
            kept.add("compactions", compaction(server))
            time.sleep(max(0.0, began + scale.compact_every_s - time.monotonic()))
        marks.append(time.monotonic())
        time.sleep(middle_s / 2)
        marks.append(time.monotonic())
        load.stop_early()
        answers = load.finish()
    kept.put(after=_counters(server), tokens=sum(answer.tokens for answer in answers), failed=failures(answers))
    kept.put(result=compact_result(answers, kept.data["compactions"], marks))
    _keep_gaps(bench, answers, marks)


def compact_result(answers: Sequence[Answer], done: Sequence[dict[str, Any]], marks: Sequence[float]) -> dict[str, Any]:
    """The compactions against the time without: longest gaps in like windows, latencies, bytes and durations."""
    found = gaps(answers, marks[0], marks[3])
    starts = [row["asked"] for row in done]
    with_it = [longest_gap_s(found, at, at + WINDOW_S) for at in starts]
    without = [longest_gap_s(found, at, at + WINDOW_S) for at in control_starts(marks, CONTROL_WINDOWS)]
    returned = [row["returned"] for row in done if row["returned"] is not None]
    durations = [row["duration_s"] for row in done if row["duration_s"] is not None]
    return {
        "compactions": len(done),
        "answered_after_the_window": sum(row["answered_after_s"] > WINDOW_S for row in done),
        "returned_mib": _stats([value / MIB for value in returned]),
        "duration_ms": _stats([value * 1000 for value in durations]),
        "answered_ms": _stats([row["answered_after_s"] * 1000 for row in done]),
        "smi_returned_mib": _stats([row["smi_before_mib"] - row["smi_after_mib"] for row in done]),
        "longest_gap_with_ms": _stats([value * 1000 for value in with_it if value is not None]),
        "longest_gap_without_ms": _stats([value * 1000 for value in without if value is not None]),
        "with": summary(answers, marks[1], marks[2]),
        "without_before": summary(answers, marks[0], marks[1]),
        "without_after": summary(answers, marks[2], marks[3]),
        "failed": len(failures(answers)),
    }


def control_starts(marks: Sequence[float], count: int, seed: int = 0) -> list[float]:
    """Moments at random in the time before the compactions and after them, each with room for its window."""
    dice = random.Random(seed)
    spans = [(begin, end - WINDOW_S) for begin, end in ((marks[0], marks[1]), (marks[2], marks[3])) if end - begin > WINDOW_S]
    lengths = [end - begin for begin, end in spans]
    return [dice.uniform(*dice.choices(spans, lengths)[0]) for _ in range(count)] if spans else []


def _stats(values: Sequence[float]) -> dict[str, float | int | None]:
    ordered = sorted(values)
    if not ordered:
        return {"n": 0, "min": None, "median": None, "mean": None, "max": None}
    return {
        "n": len(ordered), "min": round(ordered[0], 3), "median": round(statistics.median(ordered), 3),
        "mean": round(statistics.fmean(ordered), 3), "max": round(ordered[-1], 3),
    }  # fmt: skip


def _keep_gaps(bench: Bench, answers: Sequence[Answer], marks: Sequence[float]) -> None:
    """Every stream's pieces, in milliseconds from the first mark: the raw material."""
    rows = [[round((at - marks[0]) * 1000, 1) for at in (answer.sent, *answer.pieces)] for answer in answers]
    with gzip.open(bench.out / "compact-pieces.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"marks_s": [mark - marks[0] for mark in marks], "first_mark": marks[0], "sent_then_pieces_ms": rows}, file)


def _counters(server: Served) -> dict[str, Any]:
    found = allocator(server.port)
    return {name: found.get(name) for name in COUNTERS} | {"smi": read_gpu(ask_smi()["gpu"]), "at": time.time()}


# Neighbour


def neighbour(bench: Bench, kept: Kept) -> None:
    """First where compaction should not matter, then where it should; the last step may cost the engine its life."""
    alone(bench, kept, bench.scale.neighbour_pairs)
    beside(bench, bench.shared(), kept)


def alone_longer(bench: Bench, kept: Kept) -> None:
    """The first half with more pairs: three of twenty seconds say little."""
    alone(bench, kept, bench.scale.alone_pairs)


def alone(bench: Bench, kept: Kept, count: int) -> None:
    """No neighbour: the same traffic with compaction every ten seconds and without, in pairs."""
    server, scale = bench.shared(), bench.scale
    kept.put(flags=scale.flags)
    every_s = min(EVERY_S, scale.neighbour_run_s / 2)

    def run(number: int, *, is_compacting: bool) -> dict[str, Any]:
        before = _counters(server)
        done: list[dict[str, Any]] = []
        with Streams(server.port, scale.model_name, scale.mixed, RAMP_S + scale.neighbour_run_s, seed=number) as load:
            begin = load.begin + RAMP_S
            while is_compacting and (at := begin + (len(done) + 0.25) * every_s) < begin + scale.neighbour_run_s:
                time.sleep(max(0.0, at - time.monotonic()))
                done.append(compaction(server))
            answers = load.finish()
        row = summary(answers, begin, begin + scale.neighbour_run_s)
        row |= {"before": before, "after": _counters(server), "compactions": done}
        kept.add("alone_runs", {"pair": number, "is_compacting": is_compacting, **row})
        return row

    run(0, is_compacting=False)  # so that the first pair does not pay for what is done once
    pairs = alternate(count, lambda n: run(n, is_compacting=True), lambda n: run(n, is_compacting=False))
    kept.put(alone=compared(pairs))


def beside(bench: Bench, server: Served, kept: Kept) -> None:
    """A neighbour asks for more than is free but less than is free and releasable together."""
    scale = bench.scale
    _step(server, kept, "grow", _drive(bench, server, scale.long))
    time.sleep(2.5)  # the worker looks at its segments anew
    with bench.neighbour() as filler, bench.neighbour() as other:
        if filler is None or other is None:
            kept.put(beside="not here: there is no GPU")
            _step(server, kept, "compact", compaction(server))
            return
        _step(server, kept, "fill", filler.tell(f"leave {LEFT_FREE_MIB}"))
        free_mib = int(other.tell("free")["free_mib"])
        releasable_mib = int((allocator(server.port).get("releasable") or 0) / MIB)
        wanted_mib = free_mib + int(NEIGHBOUR_SHARE * releasable_mib)
        kept.put(free_mib=free_mib, releasable_mib=releasable_mib, wanted_mib=wanted_mib)
        without = _step(server, kept, "ask without compaction", other.tell(f"hold {wanted_mib}"))
        _step(server, kept, "compact", compaction(server))
        with_it = _step(server, kept, "ask after compaction", other.tell(f"hold {wanted_mib}"))
        kept.put(failed_without=without["wrong"] is not None, succeeded_with=with_it["wrong"] is None)
        _go_on_serving(bench, server, kept, other, wanted_mib)


def _go_on_serving(bench: Bench, server: Served, kept: Kept, other: Ballast, wanted_mib: int) -> None:
    """After it gave memory away: short prompts, long ones once the neighbour is gone, long ones while it is there."""
    scale = bench.scale
    short = _step(server, kept, "short prompts beside it", _drive(bench, server, scale.short))
    _step(server, kept, "the neighbour goes", other.tell("free"))
    long = _step(server, kept, "long prompts after it", _drive(bench, server, scale.long))
    kept.put(short_failed=short["failed"], long_failed_after=long["failed"])
    _step(server, kept, "compact again", compaction(server))
    _step(server, kept, "ask again", other.tell(f"hold {wanted_mib}"))
    last = _step(server, kept, "long prompts beside it", _drive(bench, server, scale.long))
    time.sleep(6)  # an engine that dies takes its server along within five seconds
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    said = [line[:400] for line in log.splitlines() if FAILURE.search(line) or re.search(r"CUDA out of memory", line)]
    kept.put(long_failed_beside=last["failed"], exit_code=server.exit_code(), log_says=said[:12])


def _drive(bench: Bench, server: Served, shape: Any) -> dict[str, Any]:
    """Eight seconds of this traffic, or what the dry run takes for them."""
    with Streams(server.port, bench.scale.model_name, shape, min(8.0, bench.scale.neighbour_run_s)) as load:
        answers = load.finish()
        return summary(answers, load.begin, load.end)


def _step(server: Served, kept: Kept, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write down one step with the figures after it."""
    memory = workers(server.port)
    kept.add("steps", {"step": name, "did": found, "counters": _counters(server),
                       "device_memory": memory[0]["device_memory"] if memory else None})  # fmt: skip
    return found
