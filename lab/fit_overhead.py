"""Fit and score plimsoll's overhead terms: python -m lab.fit_overhead [--write]

Reads ../shared/data/startups (not part of the repository) and the starts below, which are our own. Every error it prints is of
a start whose architecture was left out of the fit. `--write` puts the tables into docs/overhead.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from plimsoll.models.shape import ModelShape, Quantization, Tower
from plimsoll.plan import ledger as table
from plimsoll.plan.ledger import Overhead, era_of, overhead
from plimsoll.plan.settings import Settings, batch_limits, v2_by_default
from plimsoll.units import GIB, Estimate
from plimsoll.vllm.versions import Behaviour

STARTUPS = Path(__file__).parents[2] / "shared" / "data" / "startups"
DOCS = Path(__file__).parents[1] / "docs" / "overhead.md"
CAMPAIGN = "llm-d-incubation/llm-d-planner#205"
CAPABILITY = {"H100": (9, 0), "H200": (9, 0), "H20": (9, 0), "A100": (8, 0), "L40S": (8, 9), "L4": (8, 9), "4090": (8, 9),
              "T4": (7, 5), "V100": (7, 0), "3090": (8, 6), "A40": (8, 6), "RTX PRO": (12, 0), "B200": (10, 0), "2060": (7, 5),
              "80 GB class": (9, 0), "Ada": (8, 9)}  # fmt: skip

ENCODER_DECODERS = {"openai/whisper-large-v3-turbo", "meta-llama/Llama-3.2-11B-Vision"}
# Why a row is missed, found by reading it; rows that are not here are missed by the band alone.
REASONS = {
    "llm-d-incubation-llm-d-p-gpt-oss-120b-tp1": "terms right; the row's own figures add up at utilisation 0.95, not 0.90",
    "llm-d-incubation-llm-d-p-mistral-small-3.2-24b-instruct-2506-tp1": "fits about 256 sequences, not the default 1024",
    "vllm12126-llama-3.2-11b-vision-tp1": "the first engine profiled 128 pictures through cross-attention",
    "vllm20069-whisper-large-v3-turbo-tp1": "the first engine profiled 256 recordings",
    "vllm10702-meta-llama-3.1-70b-instruct-tp8": "7.7 GiB outside torch over eight GPUs: NCCL of that time, one such start",
    "idx34802511869-opt-2.7b-tp4": "half the sampler's peak: fewer sequences than the default, not stated",
    "vllm11899-qwen2-vl-7b-instruct-awq-tp1": "fewer sequences than the default, not stated",
    "idx17822999525-deepseek-v2.5-tpx": "parallelism not stated",
}  # fmt: skip


class Start(NamedTuple):
    """One start with what its log said, in GiB per GPU."""

    name: str
    architecture: str
    is_campaign: bool
    shape: ModelShape
    given: Settings
    requested: float
    weights: float
    kv: float
    activation: float | None
    non_torch: float | None
    graph: float | None
    graph_estimate: float | None
    remark: str


def read_starts() -> list[Start]:
    """The rows that state enough: a release, the card's memory, weights and KV."""
    shapes = json.loads((STARTUPS / "architectures.json").read_text())
    rows = [json.loads(line) for line in (STARTUPS / "startups.jsonl").read_text().splitlines()]
    return [start for row in rows if (start := _start(row, shapes)) is not None]


def _start(row: dict[str, Any], shapes: dict[str, Any]) -> Start | None:
    total = row["gpu_total_gib"] or (79.19 if row["source"] == CAMPAIGN else None)
    release = _release(row)
    needed = (total, release, row["weights_gib"], row["kv_available_gib"], row["gpu_memory_utilization"], row["arch_ref"])
    if any(value is None for value in needed) or row["outcome"] != "ok" or not row["weights_gib"]:
        return None
    assert release is not None
    assert total is not None
    tokens, sequences, guessed = _batch(row, release, total)
    shape = _shape(row["arch_ref"], shapes[row["arch_ref"]], row["quantization"])
    given = Settings(
        release=release,
        gpu_bytes=int(total * GIB),
        compute_capability=next((cc for name, cc in CAPABILITY.items() if name in (row["gpu"] or "")), None),
        tensor_parallel=row["tensor_parallel"] or 1,
        pipeline_parallel=row["pipeline_parallel"] or 1,
        data_parallel=row["data_parallel"] or 1,
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_model_len=row["max_model_len"] or 4096,
        enforce_eager=bool(row["enforce_eager"]),
        estimates_graphs=Behaviour.GRAPH_ESTIMATE.is_in(release),
        v2_runner=v2_by_default(release, shape),
    )
    requested = total * row["gpu_memory_utilization"]
    return Start(row["id"], row["arch_ref"], row["source"] == CAMPAIGN, shape, given, requested, row["weights_gib"],
                 row["kv_available_gib"], row["activation_peak_gib"], row["non_torch_gib"], row["graph_gib"],
                 row["graph_est_gib"], guessed)  # fmt: skip


def _release(row: dict[str, Any]) -> str | None:
    if row["engine"] == "V0":
        return "0.7.3"  # the first engine, whatever the number
    found = re.search(r"\d+\.\d+(\.\d+)?", row["vllm_version"] or "")
    if found is None:
        return "0.11.0" if "v0.11.0" in (row["notes"] or "") else None
    return found[0] if found[0].count(".") == 2 else f"{found[0]}.0"


def _batch(row: dict[str, Any], release: str, total: float) -> tuple[int, int, str]:
    context = row["max_model_len"] or 4096
    known = 256, 2048 if context > 32768 else max(context, 2048)  # the first engine
    if release != "0.7.3":
        try:
            known = batch_limits(release, row["gpu"] or "", int(total * GIB)) or known
        except KeyError:
            known = batch_limits("0.19.0", row["gpu"] or "", int(total * GIB)) or known
    tokens, sequences = row["max_num_batched_tokens"], row["max_num_seqs"]
    guessed = [what for what, value in (("tokens", tokens), ("sequences", sequences)) if value is None]
    return tokens or known[1], sequences or known[0], f"{' and '.join(guessed)} assumed" if guessed else ""


def _shape(reference: str, entry: dict[str, Any], quantization: str | None) -> ModelShape:
    config = {key: value for key, value in entry.items() if value is not None}
    moe = config.pop("moe", None) or {}
    names = {"num_experts": "num_experts", "top_k": "num_experts_per_tok", "moe_intermediate_size": "moe_intermediate_size"}
    config |= {name: moe[key] for key, name in names.items() if moe.get(key) is not None}
    shape = ModelShape.from_config(config)
    if entry.get("vision_tower") and not shape.towers:
        shape = replace(shape, towers=(Tower("vision"),))
    if reference in ENCODER_DECODERS:  # their entries name no architecture
        shape = replace(shape, is_encoder_decoder=True)
    if quantization and shape.quantization is None:
        shape = replace(shape, quantization=Quantization(quantization))
    return shape


def least_absolute(points: Sequence[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """The plane through the points with the least sum of absolute errors: some points lie on it, so all choices are tried."""
    every = range(len(points[0][0]))
    used = [i for i in every if any(x[i] for x, _ in points)]  # a feature that no point has gets 0
    if len(used) < len(every):
        part = least_absolute([(tuple(x[i] for i in used), y) for x, y in points])
        return tuple(part[used.index(i)] if i in used else 0.0 for i in every)
    width = len(used)
    best: tuple[float, tuple[float, ...]] | None = None
    for chosen in combinations(points, width):
        solved = _solve([[*x, y] for x, y in chosen])
        if solved is None:
            continue
        error = sum(abs(sum(a * b for a, b in zip(solved, x, strict=True)) - y) for x, y in points)
        if best is None or error < best[0]:
            best = error, solved
    assert best is not None, "the points do not span a plane"
    return best[1]


def _solve(rows: list[list[float]]) -> tuple[float, ...] | None:
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-9:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for other in range(size):
            if other != column:
                factor = rows[other][column]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[column], strict=True)]
    return tuple(row[-1] for row in rows)


class Fit(NamedTuple):
    """What the rows decide; the rest of the table is counted in vLLM's source or measured by us."""

    sampler_bytes: dict[str, float]  # by era
    alone: dict[str, tuple[float, float, float]]
    together: dict[str, tuple[float, float, float]]
    graph_actual: tuple[float, ...]
    graph_estimate: tuple[float, ...]


def fit(starts: Iterable[Start]) -> Fit:
    """Medians for the sampler, the upper end for memory outside torch, least absolute deviations for graphs."""
    starts = list(starts)
    sampler: dict[str, list[float]] = {}
    alone: dict[str, list[float]] = {}
    together: dict[str, list[float]] = {}
    for start in starts:
        era = era_of(start.given.release).name
        if (implied := _implied_bytes(start)) is not None:
            sampler.setdefault(era, []).append(implied)
        fast = start.given.compute_capability == (9, 0) and not start.shape.vocab_size % 8 and era != "V0"
        if start.non_torch is not None and fast and start.given.pipeline_parallel == 1:
            (alone if start.given.tensor_parallel == 1 else together).setdefault(era, []).append(start.non_torch)
    graphs = [start for start in starts if start.is_campaign and start.graph is not None]
    return Fit(
        {era: median(values) for era, values in sampler.items()},
        {era: _upper(values) for era, values in alone.items()},
        {era: _upper(values) for era, values in together.items()},
        least_absolute([(_graph_features(start), start.graph or 0.0) for start in graphs]),
        least_absolute([(_graph_features(start), start.graph_estimate or 0.0) for start in graphs]),
    )


def _upper(values: list[float]) -> tuple[float, float, float]:
    return max(values), min(values) - 0.07, max(values) + 0.12


def _graph_features(start: Start) -> tuple[float, ...]:
    shape = start.shape
    return 1.0, float(len(shape.layers)), float(shape.moe is not None), float(shape.quantization is not None)


def _implied_bytes(start: Start) -> float | None:
    """Bytes per logit the printed peak implies, where the sampler's is by far the largest peak."""
    era, given = era_of(start.given.release), start.given
    if start.activation is None or start.shape.towers:
        return None
    without = overhead(start.shape, given, replace(era, sampler_bytes=0.0)).activation
    batch_bytes = min(given.max_num_seqs, given.max_num_batched_tokens) * start.shape.vocab_size
    if start.activation * GIB < 1.5 * without.value and "sampler" not in without.why:
        return None
    rest = table.sampler_peak(start.shape, table.batch_of(given), replace(era, sampler_bytes=0.0), v2=False)
    return (start.activation * GIB - rest) / batch_bytes


def predicted(start: Start, fitted: Fit) -> Overhead:
    """The terms with the fitted figures in place of the table's."""
    era = era_of(start.given.release)
    terms = era.non_torch
    era = replace(era,
        sampler_bytes=fitted.sampler_bytes.get(era.name, era.sampler_bytes),
        non_torch={**terms, "alone": fitted.alone.get(era.name, terms["alone"]),
                   "together": fitted.together.get(era.name, terms["together"])},
    )  # fmt: skip
    return overhead(start.shape, start.given, era)


class Score(NamedTuple):
    """One held-out start, in GiB: positive errors promise KV that is not there."""

    start: Start
    terms: Overhead
    error: float
    is_covered: bool
    half_width: float


def score(starts: list[Start]) -> list[Score]:
    """Each start against a fit without its architecture (and without its twins: same shape, other name)."""
    scores = []
    for start in starts:
        others = [other for other in starts if not same_architecture(other, start)]
        terms = predicted(start, fit(others))
        budget = start.requested - start.weights
        subtracted = (terms.activation, terms.non_torch, terms.graphs)
        error = budget - sum(term.value for term in subtracted) / GIB - start.kv
        low, high = (sum(part) / GIB for part in zip(*(_ends(term) for term in subtracted), strict=True))
        # Rounding of five printed figures, 0.005 each, is not an error of ours.
        scores.append(Score(start, terms, error, budget - high - 0.025 <= start.kv <= budget - low + 0.025, (high - low) / 2))
    return scores


def _ends(term: Estimate) -> tuple[int, int]:
    return term.low, term.high


def same_architecture(one: Start, other: Start) -> bool:
    a, b = one.shape, other.shape
    return one.architecture == other.architecture or (
        (a.hidden_size, len(a.layers), a.intermediate_size) == (b.hidden_size, len(b.layers), b.intermediate_size)
    )


def per_architecture(scores: list[Score], figure: str) -> float:
    """The mean over architectures of the mean over their starts."""
    groups: dict[str, list[float]] = {}
    for one in scores:
        total = one.start.given.gpu_bytes / GIB
        values = {"kv": abs(one.error) / one.start.kv, "card": abs(one.error) / total, "gib": abs(one.error)}
        groups.setdefault(one.start.architecture, []).append(values[figure])
    return mean(mean(group) for group in groups.values())


def report(scores: list[Score], fitted: Fit) -> str:
    """The tables of docs/overhead.md."""
    out = [_fit_lines(fitted)]
    covered = sum(one.is_covered for one in scores)
    width = median(one.half_width / one.start.requested for one in scores)
    out.append(f"All held-out starts: band covers {covered} of {len(scores)}; median half-width {width:.2%} of the request.\n")
    for title, chosen in (("llm-d-planner#205", [s for s in scores if s.start.is_campaign]),
                          ("the rest", [s for s in scores if not s.start.is_campaign])):  # fmt: skip
        covered = sum(one.is_covered for one in chosen)
        worst = max(one.error / one.start.requested for one in chosen)
        width = median(one.half_width / one.start.requested for one in chosen)
        out.append(
            f"### Held out: {title} ({len(chosen)} starts)\n\n"
            f"Mean absolute error per architecture: {per_architecture(chosen, 'gib'):.3f} GiB, "
            f"{per_architecture(chosen, 'card'):.2%} of the card, {per_architecture(chosen, 'kv'):.2%} of KV. "
            f"Largest over-estimate of KV: {max(0.0, worst):.2%} of the request. "
            f"Band covers {covered} of {len(chosen)}; median half-width {width:.2%} of the request.\n"
        )
        out.append("| start | vLLM | activation | outside torch | KV error | of request | in band | note |\n"
                   "|---|---|---|---|---|---|---|---|")  # fmt: skip
        out.extend(_line(one) for one in chosen)
        out.append("")
    return "\n".join(out)


def _fit_lines(fitted: Fit) -> str:
    sampler = ", ".join(f"{era}: {value:.1f}" for era, value in fitted.sampler_bytes.items())
    graphs = "; ".join(f"{what} " + ", ".join(f"{x:.4f}" for x in xs)
                       for what, xs in (("actual", fitted.graph_actual), ("estimate", fitted.graph_estimate)))  # fmt: skip
    alone = ", ".join(f"{era}: {v[0]:.2f}" for era, v in fitted.alone.items())
    together = ", ".join(f"{era}: {v[0]:.2f}" for era, v in fitted.together.items())
    return (f"Fitted on all rows. Sampler, bytes per logit: {sampler}.\nOutside torch on Hopper, GiB, one GPU: {alone}; "
            f"tensor parallel: {together}.\nGraphs (fixed, per layer, experts, quantised), GiB: {graphs}.\n")  # fmt: skip


def _line(one: Score) -> str:
    start, terms = one.start, one.terms

    def pair(term: Estimate, measured: float | None) -> str:
        return f"{term.value / GIB:.2f} for {'?' if measured is None else f'{measured:.2f}'}"

    engine = "V0" if start.given.release == "0.7.3" else start.given.release
    cells = (start.name[:60], engine, pair(terms.activation, start.activation), pair(terms.non_torch, start.non_torch),
             f"{one.error:+.2f}", f"{one.error / start.requested:+.2%}", "yes" if one.is_covered else "no",
             REASONS.get(start.name) or start.remark)  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Print the tables; with --write, put them into the docs."""
    if not STARTUPS.exists():
        print(f"{STARTUPS} is not there: nothing to fit")
        return 3
    starts = read_starts()
    fitted = fit(starts)
    text = report(score(starts), fitted)
    print(text)
    print(f"the table has GRAPH_ACTUAL {table.GRAPH_ACTUAL} GRAPH_ESTIMATE {table.GRAPH_ESTIMATE}")
    if "--write" in arguments:
        page = DOCS.read_text()
        before, after = page.split("<!-- figures -->")[0], page.split("<!-- end -->")[1]
        DOCS.write_text(f"{before}<!-- figures -->\n\n{text}\n<!-- end -->{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
