"""The report of `plimsoll plan`, as a drawn ledger and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from plimsoll.findings import Severity
from plimsoll.plan.findings import NOT_OF_MEMORY, deciding_fact, is_for_the_user
from plimsoll.plan.learned import TermDifference
from plimsoll.plan.ledger import Ledger
from plimsoll.plan.read import MemoryPlan
from plimsoll.plan.workload import Cell, CellState, Matrix, Waste, WorkloadAnswer, WorkloadVerdict
from plimsoll.redaction import one_line, redact_words
from plimsoll.render.flags import flags_json, rewritten_line
from plimsoll.render.terminal import BAD, BOLD, FAINT, GOOD, NAME, SEVERITY, WARN, Line, Report, Table, json_text, picked
from plimsoll.units import GIB, Estimate, format_count, format_gib

_WORDS = {CellState.FITS: "fits", CellState.RISK: "risk", CellState.NO: "no"}
LEGEND = (
    "percent: KV cache in use when every request has its full context (12x: twelve times the cache)",
    "fits: all of them at once, at the low end of the KV band too",
    "risk: may be preempted: fits only while requests are half grown on average, or only above the low end of the band",
    "no: the rest waits; nothing crashes      no start: vLLM refuses this context",
)
WAITS = "* more than --max-num-seqs: the rest waits in line whatever the cache has"
_GROWTH = "Outputs grow while they are made: when the cache runs out, vLLM preempts a request and computes it again later."


def band_json(term: Estimate) -> dict[str, Any]:
    """An estimate with its band."""
    return picked(term, "value low high")


def matrix_lines(matrix: Matrix) -> Report:
    """The grid as a table that needs no colour."""
    rows = [
        [format_count(number), *(cell_text(cell) for cell in row)]
        for number, row in zip(matrix.spec.concurrencies, matrix.rows, strict=True)
    ]
    rows.append(["at most", *("-" if most is None else format_count(most) for most in matrix.at_once)])
    head = ["at once", *map(format_count, matrix.spec.contexts)]
    report = Report([Line("What fits, by context (tokens of one request) and requests at once:", 2, BOLD), ""])
    report += [Table("lr", rows, head), "", *(Line(f"  {text}", 4, FAINT) for text in legend_of(matrix))]
    return report


def legend_of(matrix: Matrix) -> list[str]:
    """Returns the meaning of the words in the cells, and why contexts are refused."""
    said = list(LEGEND)
    if any(cell.waits for row in matrix.rows for cell in row):
        said.append(WAITS)
    return said + [f"{format_count(cell.context)} tokens: {one_line(cell.why)}" for cell in matrix.rows[0] if not cell.starts]


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
            picked(cell, "context concurrency state starts kv_use=use tokens waits why") for row in matrix.rows for cell in row
        ],
    }


def workload_lines(answer: WorkloadAnswer) -> Report:
    """The verdict on a workload, the memory that paging saves, and the waste of the last block."""
    head = ["block", "unfilled", "of last block", "of all slots", "any length"]
    report = Report([Line("Workload:", 2, BOLD), ""])
    report += [Line(f"  {sentence}", 4) for sentence in workload_sentences(answer)]
    report += ["", Table("lr", [waste_cells(waste) for waste in answer.waste], head), Line(f"  {WASTE_NOTE}", 4, FAINT)]
    return report


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


def workload_sentences(answer: WorkloadAnswer) -> list[str]:
    """Returns the sentences on a workload, the verdict first."""
    said = [_matrix_verdict(answer)]
    if answer.too_long:
        is_longer, them = ("is longer", "it") if answer.too_long == 1 else ("are longer", "them")
        many = f"{format_count(answer.too_long)} of {format_count(len(answer.workload.requests))} requests {is_longer}"
        said.append(f"{many} than max_model_len {format_count(answer.max_model_len)}: vLLM refuses {them}")
    if answer.verdict in (WorkloadVerdict.NO_START, WorkloadVerdict.TOO_LONG):
        return said
    if answer.at_once is None:
        return [*said, "The model keeps no KV cache: blocks do not limit it."]
    said.append(_capacity(answer))
    if answer.use_at_prompt is not None and answer.use_at_end is not None:
        uses = f"{percent(answer.use_at_prompt)} with the prompts, {percent(answer.use_at_end)} at the end."
        is_tight = answer.verdict is WorkloadVerdict.FITS and (answer.at_once_low or 0) < (answer.workload.concurrency or 1)
        tight = " At the low end of the KV band it does not fit." if is_tight else ""
        said.append(f"KV use at that concurrency: {uses}{tight}")
    elif answer.at_once_prompts is not None:
        said.append(f"With prompts alone {format_count(answer.at_once_prompts)} fit.")
    if answer.waits:
        said.append(f"{format_count(answer.waits)} requests are beyond --max-num-seqs and wait whatever the cache has.")
    number = "one such request takes" if answer.counted == 1 else f"{format_count(answer.counted)} such requests take"
    text = (
        f"Paging saves {percent(answer.saved_share)}: {number} {format_gib(answer.paged_bytes)} of a GPU at the end; reserving "
        f"max_model_len ({format_count(answer.max_model_len)} tokens) for each would take {format_gib(answer.reserved_bytes)}"
    )
    more = "" if answer.reserved_at_once is None else f", and {format_count(answer.reserved_at_once)} would fit."
    said.append(text + more)
    if len(answer.workload.requests) > 1 and answer.workload.concurrency is None:
        came = "When they came is not looked at here: `plimsoll simulate` replays that."
        said.append(f"{came} FILE:concurrency=64 asks for 64 at once.")
    return said


def _matrix_verdict(answer: WorkloadAnswer) -> str:
    number, requests = answer.workload.concurrency, answer.workload.requests
    if len(requests) == 1:
        load = f"{format_count(requests[0][0])} prompt and {format_count(requests[0][1])} output tokens"
    else:
        mean = sum(map(sum, requests)) / len(requests)
        load = f"{format_count(len(requests))} recorded requests of {mean:,.0f} tokens on average"
    what = "one at a time" if number is None else f"{format_count(number)} at once"
    too_much = "the prompts fit, prompt and output of all of them do not."
    return {
        WorkloadVerdict.FITS: f"fits: {what}, {load}.",
        WorkloadVerdict.PREEMPTS: f"may preempt: {what}, {load}: {too_much} {_GROWTH}",
        WorkloadVerdict.NO: f"does not fit: {what}, {load}: not even the prompts fit at once. The rest waits; nothing crashes.",
        WorkloadVerdict.TOO_LONG: f"too long: {load}.",
        WorkloadVerdict.NO_START: f"the server does not start, so nothing is served: {load}.",
    }[answer.verdict]


def _capacity(answer: WorkloadAnswer) -> str:
    assert answer.at_once is not None
    band = ""
    if answer.at_once_low is not None and answer.at_once_high is not None and answer.at_once_low != answer.at_once_high:
        band = f" ({format_count(answer.at_once_low)} to {format_count(answer.at_once_high)} over the band)"
    groups = " + ".join(f"{g.blocks_per_request} {g.kind}" for g in answer.largest_groups)
    total = sum(group.blocks_per_request for group in answer.largest_groups)
    blocks = f"{format_count(total)} {'block' if total == 1 else 'blocks'}"
    text = f"At their end {format_count(answer.at_once)} fit at once{band}: {blocks}"
    text += f" ({groups})" if len(answer.largest_groups) > 1 else ""
    text += f" each, of {format_count(answer.usable_blocks)}."
    if len(answer.workload.requests) > 1 and answer.at_once_typical is not None:
        text += f" That is for the largest together; of the average mixture {format_count(answer.at_once_typical)} fit."
    if (answer.at_once_settled or 0) > (answer.at_once_typical or 0):
        text += f" Once all decode and windows have slid, {format_count(answer.at_once_settled or 0)} fit."
    return text


def percent(share: float) -> str:
    """A share in per cent: without decimals from ten on, 100 % only when exact, and 12x for twelve times as much."""
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
        "fits": answer.verdict is WorkloadVerdict.FITS,
        "requests": len(answer.workload.requests),
        "prompt_tokens": sum(prompt for prompt, _ in answer.workload.requests) / len(answer.workload.requests),
        "output_tokens": sum(output for _, output in answer.workload.requests) / len(answer.workload.requests),
        "concurrency": answer.workload.concurrency,
        "at_once": picked(answer, "value=at_once low=at_once_low high=at_once_high"),
        **picked(answer, "at_once_typical at_once_settled at_once_prompts blocks_per_request usable_blocks largest_tokens"),
        "groups": [picked(group, "layers kind block_size blocks=blocks_per_request") for group in answer.largest_groups],
        "kv_use": picked(answer, "prompts=use_at_prompt end=use_at_end"),
        "paging": picked(answer, "requests=counted paged_bytes reserved_bytes saved_share reserved_at_once"),
        "waste": answer.waste,
        "too_long": answer.too_long,
        "waits": answer.waits,
        "said": workload_sentences(answer),
    }


_NAMES = {
    "non_torch": "non-torch",
    "non_torch+activation": "non-torch and activation",
    "graphs_actual": "graphs, as captured",
    "kv": "KV cache",
    "kv_tokens": "KV cache, tokens",
}


def learned_as_text(differences: Sequence[TermDifference]) -> Report:
    """One line a term; a term outside its band is marked."""
    rows = []
    for difference in differences:
        shown = format_count if difference.term == "kv_tokens" else format_gib
        sizes = (difference.predicted.value, difference.measured, difference.error)
        mark = "" if difference.is_in_band else "outside the band"
        rows.append([_NAMES.get(difference.term, difference.term), *map(shown, sizes), mark])
    styles = ["" if difference.is_in_band else WARN for difference in differences]
    head = "Learned from this start; the next plan of this shape, card and release uses it."
    return Report([head, "", Table("lrrrl", rows, ["term", "planned", "measured", "error", ""], styles=styles)])


def learned_as_json(differences: Sequence[TermDifference]) -> str:
    """One object of the schema plimsoll.plan/1 with the key `learned`."""
    rows = [
        {"term": one.term, "predicted": band_json(one.predicted), **picked(one, "measured error in_band=is_in_band")}
        for one in differences
    ]
    return json_text({"schema": "plimsoll.plan/1", "learned": rows})


def forgotten(count: int, *, is_json: bool) -> str:
    """Returns the answer of --forget."""
    if is_json:
        return f'{{"schema": "plimsoll.plan/1", "forgotten": {count}}}'
    return f"forgot {count} {'correction' if count == 1 else 'corrections'}"


# The settings of a plan's object, as NAME=FIELD where the two differ.
_SETTINGS = (
    "gpu_memory_utilization=utilization max_model_len max_num_seqs max_num_batched_tokens tensor_parallel_size=tensor_parallel "
    "pipeline_parallel_size=pipeline_parallel data_parallel_size=data_parallel kv_cache_dtype "
    "enable_prefix_caching=prefix_caching async_scheduling enable_chunked_prefill=chunked_prefill scheduling_policy "
    "long_prefill_token_threshold watermark scheduler_reserve_full_isl=reserve_full_isl enforce_eager "
    "num_speculative_tokens=speculative_tokens kv_connector"
)
BAR = 64
_MARKS = "WnagK"  # weights, non-torch, activation, graphs, KV cache


def gpus_of(ledger: Ledger) -> str:
    """The card, with the number where there are several: 2 x H100."""
    number, name = ledger.settings.gpus, one_line(ledger.card.name)
    return f"{number} x {name}" if number > 1 else name


def as_json(planned: MemoryPlan, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> str:
    """One object of the schema plimsoll.plan/1; sizes in bytes."""
    from plimsoll.plan.weights_checkpoint import parameters, routed_parameters

    ledger, kv, moe = planned.ledger, planned.ledger.kv_plan, planned.shape.moe
    body: dict[str, object] = {
        "schema": "plimsoll.plan/1",
        "fits": None if planned.is_undecided else planned.fits,
        "model": planned.model,
        "vllm": ledger.settings.release,
        "gpu": {"name": ledger.card.name, "total_bytes": ledger.card.total_bytes, "count": ledger.settings.gpus},
        "ledger": {
            name: band_json(getattr(ledger, name)) for name in "requested weights non_torch activation graphs kv slack".split()
        },
        "kv": {
            **picked(kv, "block_size bytes_per_block num_blocks tokens max_concurrency max_model_len"),
            "fits_at_low_end": ledger.fits_at_low_end,
            "groups": [picked(group, "layers kind block_size blocks_per_request window") for group in kv.groups],
        },
        "settings": picked(ledger.settings, _SETTINGS),
        "parameters": {
            "total": parameters(planned.shape),
            "routed": routed_parameters(planned.shape),
            "experts": moe.experts if moe is not None else None,
            "experts_per_token": moe.experts_per_token if moe is not None else None,
        },
        "flags": flags_json([planned.checked]),
        "findings": [picked(finding, "code severity confidence title because evidence") for finding in planned.findings],
        "advice": [
            {
                **picked(advice, "flag value"),
                **({"also": [{"flag": flag, "value": value} for flag, value in advice.also]} if advice.also else {}),
                **picked(advice, "why effect"),
            }
            for advice in planned.advice
        ],
        "notes": planned.notes,
    }
    if planned.is_undecided:
        body["undecided"] = {"kv_low": ledger.kv.low, "kv_high": ledger.kv.high, "needed": kv.bytes_for_one_request,
                             "decided_by": deciding_fact(ledger, planned.shape)}  # fmt: skip
    if planned.before is not None:
        old = planned.before
        body["from"] = {"vllm": old.settings.release, "kv": band_json(old.kv), "tokens": old.kv_plan.tokens}
    if workload is not None:
        body["workload"] = workload_json(workload)
    if matrix is not None:
        body["matrix"] = matrix_json(matrix)
    return json_text(body)


def as_text(planned: MemoryPlan, matrix: Matrix | None = None, workload: WorkloadAnswer | None = None) -> Report:
    """The verdict, the bar, the terms, the cache, the findings and the advice."""
    ledger = planned.ledger
    is_fine = planned.fits and (workload is None or workload.verdict.is_fine)
    style = WARN if planned.is_undecided or not ledger.fits_at_low_end else GOOD
    style = style if is_fine or planned.is_undecided else BAD
    report = Report([Line(_verdict(planned, workload), 2, style), "", *_bar(ledger), "", _terms(ledger), "", *_cache(ledger)])
    for finding in planned.findings:
        head = f"  {finding.code}"
        report += ["", Line(f"{head}: {finding.title}", 4, SEVERITY[finding.severity], len(head))]
        report.append(Line(f"    {one_line(finding.because)}", 4))
    if planned.advice:
        besides = " beside what vLLM refuses" if any(map(is_for_the_user, planned.findings)) else ""
        report += ["", Line(f"What would help{besides}, planned again to be sure:", 2, BOLD), ""]
        for advice in planned.advice:
            report += [Line(f"  {advice.words}", 4, GOOD), Line(f"    {advice.why}: {advice.effect}", 4)]
    report += ["", *workload_lines(workload)] if workload is not None else []
    report += ["", *matrix_lines(matrix)] if matrix is not None else []
    if planned.before is not None:
        old, was, now = planned.before, planned.before.kv_plan.tokens, ledger.kv_plan.tokens
        share = f" ({(now - was) / was:+.1%})" if was > 0 else ""
        sizes = f"KV {format_gib(old.kv.value)} -> {format_gib(ledger.kv.value)}"
        tokens = f"{format_count(was)} -> {format_count(now)} tokens{share}"
        report += ["", f"From {old.settings.release} to {ledger.settings.release}: {sizes}, {tokens}"]
    return Report([*report, *(Line(f"  note: {one_line(note)}", 8, FAINT, 7) for note in planned.notes)])


def _verdict(planned: MemoryPlan, workload: WorkloadAnswer | None) -> str:
    what = f"{one_line(planned.model)} on {gpus_of(planned.ledger)}, vLLM {planned.ledger.settings.release}"
    stops = [finding for finding in planned.findings if finding.severity is Severity.CRITICAL]
    memory_first = sorted(stops, key=lambda finding: finding.code in NOT_OF_MEMORY)
    told = "; ".join(finding.title for finding in memory_first) or "too little memory"
    beside = ", but not this workload" if planned.fits and workload is not None and not workload.verdict.is_fine else ""
    if planned.is_undecided:
        kv = planned.ledger.kv
        told = f"between {format_gib(kv.low)} and {format_gib(kv.high)} are left for the KV cache, and one request of "
        told += f"full length takes {format_gib(planned.ledger.kv_plan.bytes_for_one_request)}. "
        told += f"What would decide it: {deciding_fact(planned.ledger, planned.shape)}"
    return f"{verdict(planned)}{beside}: {what}" + ("" if planned.fits else f": {told}")


def verdict(planned: MemoryPlan) -> str:
    """A few words on whether the server will start, by the central figures and by the low end of the band."""
    if planned.fits:
        return "fits" if planned.ledger.fits_at_low_end else "fits by the estimate, not at its low end"
    if planned.is_undecided:
        return "cannot be told from here"
    stops = [finding.code for finding in planned.findings if finding.severity is Severity.CRITICAL]
    return "does not start" if stops and all(code in NOT_OF_MEMORY for code in stops) else "does not fit"


def _bar(ledger: Ledger) -> list[Line]:
    """The card drawn to scale: others, context, the terms of the request, slack."""
    total = ledger.card.total_bytes
    parts = [("o", ledger.card.used_bytes), ("c", ledger.context.value)]
    terms = (ledger.weights, ledger.non_torch, ledger.activation, ledger.graphs, ledger.kv)
    parts += [(mark, max(0, term.value)) for mark, term in zip(_MARKS, terms, strict=True)]
    drawn, end, so_far = "", 0, 0
    for mark, size in parts:
        so_far += size
        upto = min(BAR, round(so_far / total * BAR))
        if size > 0 and upto == end and upto < BAR:
            upto += 1  # every term that exists is seen
        drawn += mark * (upto - end)
        end = max(end, upto)
    over = " over the edge" if so_far > total else ""
    legend = "W weights  n non-torch  a activation  g graphs  K KV cache  . slack  c context"
    drawn_bar = Line(f"  |{drawn.ljust(BAR, '.')}|{over}", 2, BAD if over else NAME)
    return [drawn_bar, Line(f"   {legend}{'  o others' if parts[0][1] else ''}", 3, FAINT)]


def _terms(ledger: Ledger) -> Table:
    card = Estimate(ledger.card.total_bytes, ledger.card.low_bytes, ledger.card.high_bytes)
    terms = [("card", card), ("requested", ledger.requested), ("  weights", ledger.weights), ("  non-torch", ledger.non_torch),
             ("  activation", ledger.activation), ("  graphs", ledger.graphs),
             ("  KV cache" if ledger.kv_plan.bytes_per_block or ledger.kv.value <= 0 else "  left over", ledger.kv),
             ("slack", ledger.slack)]  # fmt: skip
    rows = []
    for name, term in terms:
        band = "" if term.is_exact else f"{format_gib(term.low)} to {format_gib(term.high)}"
        rows.append([name, format_gib(term.value), band, term.why.split(";")[0]])
    return Table("lrlw", rows, styles=[BOLD if name == "  KV cache" else "" for name, _ in terms])


def _cache(ledger: Ledger) -> list[str | Line]:
    kv = ledger.kv_plan
    if kv.bytes_per_block == 0 and ledger.kv.value > 0:
        return [Line(f"  no KV cache: each text of up to {format_count(kv.max_model_len)} tokens is read in one pass", 2)]
    if kv.num_blocks <= 0 or ledger.kv.value <= 0:
        return ["  no KV blocks"]
    blocks = f"{format_count(kv.num_blocks)} blocks of {kv.block_size} tokens and {format_gib(kv.bytes_per_block)}"
    line = f"  {blocks}: {format_count(kv.tokens)} tokens"
    if kv.max_concurrency:
        line += f", {kv.max_concurrency:.2f} requests of {format_count(kv.max_model_len)} tokens at once"
    elif kv.groups:
        line += "; how many requests fit at once is not known: the cross-attention of each is not counted"
    return [line, *_at_low_end(ledger)]


def _at_low_end(ledger: Ledger) -> list[Line]:
    """For a plan that fits by its central figures alone: what the low end would refuse, and what starts even there."""
    if not ledger.fits or ledger.fits_at_low_end:
        return []
    kv = ledger.kv_plan
    needs = f"one request of {format_count(kv.max_model_len)} tokens takes {format_gib(kv.bytes_for_one_request)}"
    there = f"has {format_gib(ledger.kv.low)} and vLLM does not start: {needs}" if ledger.kv.low > 0 else "has no block at all"
    shorter = ledger.context_at_low_end
    sure = "A larger share of the card, or more cards, would make it sure"
    if shorter:
        sure = f"--max-model-len {shorter} starts there too"
    said = f"At the low end of its band the KV cache {there}. {sure}; after a real start, --learn narrows the band."
    return [Line(f"  {said}", 2, WARN)]


_DIFFERENT = "*"
_CELL = 20  # letters of a column


class ComparedPlan(NamedTuple):
    """One line of the file: its plan, or why there is none."""

    source: str  # "FILE:3"
    plan: MemoryPlan | None
    problem: str = ""


Value = int | float | str | None


class _Row(NamedTuple):
    name: str
    values: tuple[Value, ...]  # None: there is no plan, or no such figure
    show: Callable[[Value, Value], str]  # the value of one plan, and that of the first

    def differs(self) -> bool:
        return len({value for value in self.values if value is not None}) > 1


def compare_as_text(compared: Sequence[ComparedPlan], notes: Sequence[str] = ()) -> Report:
    """The legend of the columns, the table with a mark at every row that differs, the problems, and the notes."""
    report = Report()
    for number, one in enumerate(compared):
        line = rewritten_line(one.plan.checked) if one.plan is not None else f"not planned: {one_line(one.problem)}"
        report.append(Line(f"{letter(number):>3}  {one_line(one.source)}: {line}", 5, "" if one.plan is not None else BAD))
    rows, written = _rows(compared), [_flags(one.plan) for one in compared]
    planned = [flags for one, flags in zip(compared, written, strict=True) if one.plan is not None]
    # The flags of each plan that not all of the commands have, as they were written; a long value has a line of its own.
    differing = [[flag for flag in flags if not all(flag in others for others in planned)] for flags in written]
    own = [
        [part for flag in flags for part in ([flag] if len(flag) <= _CELL else flag.replace(" ", "\n  ", 1).split("\n"))]
        for flags in differing
    ]
    depth = max(map(len, own), default=0)
    cells = [["", "", *(_cut(flags[place]) if place < len(flags) else "" for flags in own)] for place in range(depth)]
    for row in rows:
        mark = _DIFFERENT if row.differs() else ""
        cells.append([mark, row.name, *(_cut(row.show(value, row.values[0])) for value in row.values)])
    styles = [*[NAME] * depth, *(BOLD if row.differs() else "" for row in rows)]
    report += ["", Table("l", cells, ["", "", *map(letter, range(len(compared)))], repeated=3, styles=styles), ""]
    same = "" if any(row.differs() for row in rows) else "; nothing differs"
    report.append(f"{_DIFFERENT} differs between the plans; in brackets: GiB more or less than {letter(0)}{same}")
    for number, one in enumerate(compared):
        for finding in one.plan.findings if one.plan is not None else ():
            head = f"{letter(number):>3}  {finding.code.value}"
            report.append(Line(f"{head}: {one_line(finding.title)}", 5, SEVERITY[finding.severity], len(head)))
    return Report([*report, *(Line(f"  note: {one_line(note)}", 8, FAINT, 7) for note in notes)])


def compare_as_json(compared: Sequence[ComparedPlan], notes: Sequence[str] = ()) -> str:
    """One object: `compare` has a whole plan a line, `differences` the rows that differ."""
    body = {
        "schema": "plimsoll.plan/1",
        "fits": all(one.plan is not None and one.plan.fits for one in compared),
        "compare": [
            {
                "source": one.source,
                "command": None if one.plan is None else rewritten_line(one.plan.checked),
                "problem": one.problem or None,
                "plan": None if one.plan is None else json.loads(as_json(one.plan)),
            }
            for one in compared
        ],
        "differences": [{"what": row.name.strip(), "values": list(row.values)} for row in _rows(compared) if row.differs()],
        "notes": notes,
    }
    return json_text(body)


def letter(number: int) -> str:
    """A, B, ... Z, then A2, B2, ..."""
    rounds, index = divmod(number, 26)
    return chr(ord("A") + index) + (str(rounds + 1) if rounds else "")


def _flags(planned: MemoryPlan | None) -> list[str]:
    """A start's flags, each with its values; secrets are hidden."""
    found: list[str] = []
    for word in redact_words(list(planned.checked.launch.arguments)) if planned is not None else ():
        if word.startswith("-"):
            found.append(one_line(word))
        elif found:  # the words before the first flag are the model, which has a row of its own
            found[-1] += f" {one_line(word)}"
    return found


def _cut(text: str) -> str:
    """A cell cut to its column; the whole text is in the legend, or in the list below."""
    return text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."


def _rows(compared: Sequence[ComparedPlan]) -> list[_Row]:
    return [
        _Row(name, tuple(None if one.plan is None else read(one.plan) for one in compared), show)
        for name, read, show in _READERS
    ]


def _plain(value: Value, _: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}"
    return format_count(value) if isinstance(value, int) else value


def _bytes(value: Value, first: Value) -> str:
    if not isinstance(value, int):
        return "-"
    apart = value - first if isinstance(first, int) else 0
    return format_gib(value) + (f" ({apart / GIB:+.2f})" if apart else "")


def _findings(planned: MemoryPlan) -> str:
    codes = [finding.code.value for finding in planned.findings]
    return f"{len(codes)}: {', '.join(codes)}" if codes else "none"


_READERS: tuple[tuple[str, Callable[[MemoryPlan], Value], Callable[[Value, Value], str]], ...] = (
    # As in a single plan's report, shortened only where it would not fit a column.
    ("verdict", lambda p: "fits, may not start" if p.fits and not p.ledger.fits_at_low_end else verdict(p), _plain),
    ("model", lambda p: one_line(p.model), _plain),
    ("GPU", lambda p: gpus_of(p.ledger), _plain),
    ("vLLM", lambda p: one_line(p.ledger.settings.release), _plain),
    ("utilization", lambda p: f"{p.ledger.settings.utilization:g}", _plain),
    ("max-model-len", lambda p: p.ledger.kv_plan.max_model_len, _plain),
    ("max-num-seqs", lambda p: p.ledger.settings.max_num_seqs, _plain),
    ("max-num-batched-tokens", lambda p: p.ledger.settings.max_num_batched_tokens, _plain),
    ("tensor parallel", lambda p: p.ledger.settings.tensor_parallel, _plain),
    ("pipeline parallel", lambda p: p.ledger.settings.pipeline_parallel, _plain),
    ("data parallel", lambda p: p.ledger.settings.data_parallel, _plain),
    ("kv-cache-dtype", lambda p: one_line(p.ledger.settings.kv_cache_dtype), _plain),
    ("eager", lambda p: "yes" if p.ledger.settings.enforce_eager else "no", _plain),
    ("requested", lambda p: p.ledger.requested.value, _bytes),
    ("  weights", lambda p: p.ledger.weights.value, _bytes),
    ("  non-torch", lambda p: p.ledger.non_torch.value, _bytes),
    ("  activation", lambda p: p.ledger.activation.value, _bytes),
    ("  graphs", lambda p: p.ledger.graphs.value, _bytes),
    ("  KV cache", lambda p: p.ledger.kv.value, _bytes),
    ("slack", lambda p: p.ledger.slack.value, _bytes),
    ("block size", lambda p: p.ledger.kv_plan.block_size, _plain),
    ("bytes per block", lambda p: p.ledger.kv_plan.bytes_per_block, _plain),
    ("KV blocks", lambda p: p.ledger.kv_plan.num_blocks, _plain),
    ("KV tokens", lambda p: p.ledger.kv_plan.tokens, _plain),
    ("max concurrency", lambda p: p.ledger.kv_plan.max_concurrency, _plain),
    ("findings", _findings, _plain),
)
