"""What a workload and a grid of loads come to, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.domain.units import format_count, format_gib
from plimsoll.plan.kv import GroupPlan
from plimsoll.plan.matrix import Cell, Matrix, State
from plimsoll.plan.workload import Verdict, Waste, WorkloadAnswer
from plimsoll.report.flags import clean
from plimsoll.report.wrapping import WIDTH, wrapped

_FIRST, _COLUMN = 14, 13
_WORDS = {State.FITS: "fits", State.RISK: "risk", State.NO: "no"}
LEGEND = (
    "percent: KV cache in use when every request has its full context (12x: twelve times the cache)",
    "fits: all of them at once, at the low end of the KV band too",
    "risk: may be preempted: fits only while requests are half grown on average, or only above the low end of the band",
    "no: the rest waits; nothing crashes      no start: vLLM refuses this context",
)
WAITS = "* more than --max-num-seqs: the rest waits in line whatever the cache has"
_GROWTH = "Outputs grow while they are made: when the cache runs out, vLLM preempts a request and computes it again later."


def matrix_lines(matrix: Matrix) -> list[str]:
    """The grid as a table that needs no colour."""
    per_page = max(1, (WIDTH - _FIRST) // _COLUMN)
    contexts = matrix.spec.contexts
    lines = ["What fits, by context (tokens of one request) and requests at once:"]
    for start in range(0, len(contexts), per_page):
        lines += ["", *_page(matrix, slice(start, start + per_page))]
    lines.append("")
    for text in legend_of(matrix):
        lines += wrapped(f"  {text}", " " * 4)
    return lines


def legend_of(matrix: Matrix) -> list[str]:
    """What the words in the cells mean, as far as they occur, and why a context is refused."""
    said = list(LEGEND)
    if any(cell.waits for row in matrix.rows for cell in row):
        said.append(WAITS)
    return said + [f"{format_count(cell.context)} tokens: {clean(cell.why)}" for cell in matrix.rows[0] if not cell.starts]


def _page(matrix: Matrix, columns: slice) -> list[str]:
    head = "".join(f"{format_count(context):>{_COLUMN}}" for context in matrix.spec.contexts[columns])
    lines = [f"{'  at once':<{_FIRST}}{head}", "  " + "-" * (_FIRST - 2 + len(head))]
    for number, row in zip(matrix.spec.concurrencies, matrix.rows, strict=True):
        cells = "".join(f"{cell_text(cell):>{_COLUMN}}" for cell in row[columns])
        lines.append(f"{'  ' + format_count(number):<{_FIRST}}{cells}")
    most = "".join(f"{'-' if n is None else format_count(n):>{_COLUMN}}" for n in matrix.at_once[columns])
    lines.append(f"{'  at most':<{_FIRST}}{most}")
    return lines


def cell_text(cell: Cell) -> str:
    """A cell in a few letters: `fits 43%`."""
    if not cell.starts:
        return "no start"
    use = "" if cell.use is None else f" {percent(cell.use)}"
    return f"{_WORDS[cell.state]}{use}{'*' if cell.waits else ''}"


def matrix_json(matrix: Matrix) -> dict[str, object]:
    """The grid as plain data, for `matrix` in the plan's object."""
    return {
        "contexts": list(matrix.spec.contexts),
        "concurrencies": list(matrix.spec.concurrencies),
        "at_once": list(matrix.at_once),
        "cells": [
            {
                "context": cell.context,
                "concurrency": cell.concurrency,
                "state": cell.state.value,
                "starts": cell.starts,
                "kv_use": cell.use,
                "tokens": cell.tokens,
                "waits": cell.waits,
                "why": clean(cell.why),
            }
            for row in matrix.rows
            for cell in row
        ],
    }


def workload_lines(answer: WorkloadAnswer) -> list[str]:
    """The verdict on a workload, what paging saves and what the last block wastes."""
    lines = []
    for sentence in workload_sentences(answer):
        lines += wrapped(f"  {sentence}", " " * 4)
    lines += ["", f"  {'block':<14}{'unfilled':>12}{'of last block':>16}{'of all slots':>15}{'any length':>22}"]
    lines += [f"  {''.join(_waste_row(waste))}".rstrip() for waste in answer.waste]
    return ["Workload:", "", *lines, *wrapped(f"  {WASTE_NOTE}", " " * 4)]


WASTE_NOTE = (
    "Unfilled slots of a request's last block at its end; 'any length': on average where every length is equally likely. "
    "Not every attention backend takes every block size."
)


def waste_cells(waste: Waste) -> tuple[str, str, str, str, str]:
    """One row of the waste table."""
    return (
        f"{waste.block_size}{' (in force)' if waste.in_force else ''}",
        f"{waste.slots:.1f}",
        f"{waste.last_block_empty * 100:.2f} %",
        f"{waste.share * 100:.2f} %",
        f"{waste.uniform_slots:.1f}, {waste.uniform_share * 100:.2f} %",
    )


def _waste_row(waste: Waste) -> list[str]:
    name, *rest = waste_cells(waste)
    return [f"{name:<14}", *(f"{text:>{width}}" for text, width in zip(rest, (12, 16, 15, 22), strict=True))]


def workload_sentences(answer: WorkloadAnswer) -> list[str]:
    """What there is to say, the verdict first."""
    said = [_verdict(answer)]
    if answer.too_long:
        is_longer, them = ("requests is longer", "it") if answer.too_long == 1 else ("requests are longer", "them")
        many = f"{format_count(answer.too_long)} of {format_count(len(answer.workload.requests))} {is_longer}"
        said.append(f"{many} than max_model_len {format_count(answer.max_model_len)}: vLLM refuses {them}")
    if answer.verdict in (Verdict.NO_START, Verdict.TOO_LONG):
        return said
    if answer.at_once is None:
        return [*said, "The model keeps no KV cache: blocks do not limit it."]
    said.append(_capacity(answer))
    said += _uses(answer)
    if answer.waits:
        said.append(f"{format_count(answer.waits)} requests are beyond --max-num-seqs and wait whatever the cache has.")
    said.append(_paging(answer))
    if len(answer.workload.requests) > 1 and answer.workload.concurrency is None:
        came = "When they came is not looked at here: `plimsoll simulate` replays that."
        said.append(f"{came} FILE:concurrency=64 asks for 64 at once.")
    return said


def _verdict(answer: WorkloadAnswer) -> str:
    number, load = answer.workload.concurrency, _described(answer)
    what = "one at a time" if number is None else f"{format_count(number)} at once"
    return {
        Verdict.FITS: f"fits: {what}, {load}.",
        Verdict.PREEMPTS: f"may preempt: {what}, {load}: the prompts fit, prompt and output of all of them do not. {_GROWTH}",
        Verdict.NO: f"does not fit: {what}, {load}: not even the prompts fit at once. The rest waits; nothing crashes.",
        Verdict.TOO_LONG: f"too long: {load}.",
        Verdict.NO_START: f"the server does not start, so nothing is served: {load}.",
    }[answer.verdict]


def _described(answer: WorkloadAnswer) -> str:
    requests = answer.workload.requests
    if len(requests) == 1:
        prompt, output = requests[0]
        return f"{format_count(prompt)} prompt and {format_count(output)} output tokens"
    mean = sum(map(sum, requests)) / len(requests)
    return f"{format_count(len(requests))} recorded requests of {mean:,.0f} tokens on average"


def _capacity(answer: WorkloadAnswer) -> str:
    assert answer.at_once is not None
    band = ""
    if answer.at_once_low is not None and answer.at_once_high is not None and answer.at_once_low != answer.at_once_high:
        band = f" ({format_count(answer.at_once_low)} to {format_count(answer.at_once_high)} over the band)"
    groups = " + ".join(f"{g.blocks_per_request} {g.kind}" for g in answer.largest_groups)
    text = f"At their end {format_count(answer.at_once)} fit at once{band}: {_blocks(answer.largest_groups)}"
    text += f" ({groups})" if len(answer.largest_groups) > 1 else ""
    text += f" each, of {format_count(answer.usable_blocks)}."
    if len(answer.workload.requests) > 1 and answer.at_once_typical is not None:
        text += f" That is for the largest together; of the average mixture {format_count(answer.at_once_typical)} fit."
    if (answer.at_once_settled or 0) > (answer.at_once_typical or 0):
        text += f" Once all decode and windows have slid, {format_count(answer.at_once_settled or 0)} fit."
    return text


def _blocks(groups: Sequence[GroupPlan]) -> str:
    total = sum(group.blocks_per_request for group in groups)
    return f"{format_count(total)} {'block' if total == 1 else 'blocks'}"


def _uses(answer: WorkloadAnswer) -> list[str]:
    if answer.use_at_prompt is None or answer.use_at_end is None:
        return [] if answer.at_once_prompts is None else [f"With prompts alone {format_count(answer.at_once_prompts)} fit."]
    at_prompt, at_end = percent(answer.use_at_prompt), percent(answer.use_at_end)
    said = f"KV use at that concurrency: {at_prompt} with the prompts, {at_end} at the end."
    if answer.verdict is Verdict.FITS and (answer.at_once_low or 0) < (answer.workload.concurrency or 1):
        said += " At the low end of the KV band it does not fit."
    return [said]


def _paging(answer: WorkloadAnswer) -> str:
    number = "one such request takes" if answer.counted == 1 else f"{format_count(answer.counted)} such requests take"
    text = (
        f"Paging saves {percent(answer.saved_share)}: {number} {format_gib(answer.paged_bytes)} of a GPU at the end; reserving "
        f"max_model_len ({format_count(answer.max_model_len)} tokens) for each would take {format_gib(answer.reserved_bytes)}"
    )
    return text if answer.reserved_at_once is None else f"{text}, and {format_count(answer.reserved_at_once)} would fit."


def percent(share: float) -> str:
    """A share in per cent: whole ones from ten on, 100 % only when it is, and 12x for twelve times as much."""
    value = share * 100
    if value >= 1000:
        return f"{share:,.0f}x"
    text = f"{value:.0f}%" if value >= 10 else f"{value:.1f}%"
    if text == "100%" and value != 100:
        return f"{value:.1f}%" if f"{value:.1f}" != "100.0" else ("<100%" if value < 100 else ">100%")
    return text


def workload_json(answer: WorkloadAnswer) -> dict[str, object]:
    """The same as plain data, for `workload` in the plan's object."""
    return {
        "verdict": answer.verdict.value,
        "fits": answer.verdict is Verdict.FITS,
        "requests": len(answer.workload.requests),
        "prompt_tokens": sum(prompt for prompt, _ in answer.workload.requests) / len(answer.workload.requests),
        "output_tokens": sum(output for _, output in answer.workload.requests) / len(answer.workload.requests),
        "concurrency": answer.workload.concurrency,
        "at_once": {"value": answer.at_once, "low": answer.at_once_low, "high": answer.at_once_high},
        "at_once_typical": answer.at_once_typical,
        "at_once_settled": answer.at_once_settled,
        "at_once_prompts": answer.at_once_prompts,
        "blocks_per_request": answer.blocks_per_request,
        "usable_blocks": answer.usable_blocks,
        "largest_tokens": answer.largest_tokens,
        "groups": [
            {"layers": g.layers, "kind": g.kind, "block_size": g.block_size, "blocks": g.blocks_per_request}
            for g in answer.largest_groups
        ],
        "kv_use": {"prompts": answer.use_at_prompt, "end": answer.use_at_end},
        "paging": {
            "requests": answer.counted,
            "paged_bytes": answer.paged_bytes,
            "reserved_bytes": answer.reserved_bytes,
            "saved_share": answer.saved_share,
            "reserved_at_once": answer.reserved_at_once,
        },
        "waste": [waste._asdict() for waste in answer.waste],
        "too_long": answer.too_long,
        "waits": answer.waits,
        "said": workload_sentences(answer),
    }
