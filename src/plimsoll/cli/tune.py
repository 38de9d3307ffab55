"""usage: plimsoll tune TRACE... --model MODEL --gpu NAME [--slo ttft=2s,tpot=50ms] [--fit RUN] [options]
       plimsoll tune TRACE... --gpu NAME [options] -- vllm serve MODEL [any vllm flag...]

Finds the flags that serve this traffic best on this card: --max-num-seqs, --max-num-batched-tokens, --block-size and
--gpu-memory-utilization. Plan says which settings are safe and how large a cache each leaves, simulate what the traffic does in
it. Best means: most requests a second that are served as promised.

TRACE is a file as for `plimsoll simulate`, the folder of the recorder (docs/inside.md), `-`, or synthetic:...

The traffic: --limit, --from-s, --until-s, --speedup, --skip-bad, --trace-block-size, --rate, ... as for simulate. The server:
--gpu, --gpus, --gpu-memory-gib, --used-gib, --vllm as for plan, --acceptance-rate of its drafts as for simulate.

What is looked at:
  max_num_seqs=8..512 max_num_batched_tokens=512,2k,8k block_size=16,32 gpu_memory_utilization=0.85..0.95

{options}

--gpu H100,L40S,A100x2 compares cards (NAMExN: one server on N of them) by how many it takes, with --prices by what it costs.
So are shapes: kv_cache_dtype=auto,fp8 max_model_len=8192,16384 tensor_parallel_size=1,2 pipeline_parallel_size=1,2
data_parallel_size=1,2 quantization=fp8, in every combination that fits; and with as many cards as another takes.

Exit codes: 0 an answer, 1 no setting is safe or none serves a single request as promised, 2 your input is wrong, 3 something
outside failed.
Read on: docs/tune.md
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plimsoll.cli.main import OptionsCommand
from plimsoll.cli.simulate import check_words, say_compiling
from plimsoll.errors import BadInput
from plimsoll.hardware.cards import gpu_named
from plimsoll.launch.options import decimal, first_given, option, switch
from plimsoll.render.terminal import bar, show, write_file
from plimsoll.simulate.options import RoutedOptions, TrafficOptions, file_named

if TYPE_CHECKING:
    from plimsoll.render.tune import CardRow, TuneReport

# What else may be varied, its short name and an example: every combination is planned, searched and compared as a card is.
SHAPES = {
    "kv_cache_dtype": ("KV", "auto,fp8"),
    "max_model_len": ("len", "8192,16384"),
    "tensor_parallel_size": ("tp", "1,2"),
    "pipeline_parallel_size": ("pp", "1,2"),
    "data_parallel_size": ("dp", "1,2"),
    "quantization": ("quantization", "fp8"),
}


def _share(text: str, name: str) -> float:
    found = decimal(text.removesuffix("%"), name) / 100
    if not 0 < found < 1:
        raise BadInput(f"{name} must lie between 0 and 100, not {text[:40]}: 99 is what many promise")
    return found


@dataclass(frozen=True, kw_only=True)
class TuneOptions(RoutedOptions, TrafficOptions):
    slo: str | None = option("ttft=2s,tpot=50ms", "first token, each further token, e2e=30s the last; default: being served")
    model: str | None = option("MODEL", "or a whole command after `--`")
    fit: str | None = option(
        "RUN", "learn step times from a recording of this very server and flags (docs/step-time.md): then the answer is "
        "a recommendation. Without: ranges, and what to measure. --times FILE: learnt before",
    )  # fmt: skip
    keep: float | None = option(
        "PERCENT", "how many such servers keep the --slo for so many of all requests, and up to which rate", read=_share
    )
    prices: str | None = option("FILE", "JSON: dollars an hour for each card, for several cards (docs/tune.md)")
    on: str | None = option("ray", "runs on a Ray cluster (ray://HOST:PORT, or one of this machine); default: all cores here")
    json: bool = switch("one object, schema plimsoll.tune/1: feeds `simulate --plan` and `assets --plan`")
    commands: str | None = option("FILE", "what was chosen, second and yours: for `plan --compare FILE`", read=file_named)


def run(options: TuneOptions) -> int:
    check_words(options, "tune", written=("commands", "save_times"))
    from plimsoll.render import tune as report
    from plimsoll.simulate.compiled import telling

    if options.keep is not None and options.slo is None:
        raise BadInput("--keep needs a promise to keep: --slo ttft=2s,tpot=50ms")
    if options.verbatim is None and options.model is None:
        raise BadInput("which model? plimsoll tune TRACE --model MODEL --gpu NAME, or a whole command after `--`")
    if options.keep is not None and options.replicas is not None:
        raise BadInput("--keep finds how many servers it takes: leave out --replicas")
    with telling(say_compiling):
        given, shapes = split_shapes(options)
        if shapes or (options.gpu is not None and "," in options.gpu):
            return _compare(given, shapes)
        shown = tune_one(options)
    if options.commands is not None:
        write_file(options.commands, "".join(f"{line}\n" for line in report.commands(shown)))
    show(report.as_json(shown) if options.json else report.as_text(shown))
    found = shown.tuning.found
    return 0 if found is not None and found.best.score.met else 1


def split_shapes(options: TuneOptions) -> tuple[TuneOptions, dict[str, list[str]]]:
    """Words such as `kv_cache_dtype=auto,fp8` apart from traces and from the flags that the search itself turns."""
    from plimsoll.tune.inputs import split_axes

    given, axes = split_axes(options)
    shapes = {name: [value.strip() for value in axes.pop(name).split(",")] for name in SHAPES if name in axes}
    for name, values in shapes.items():
        if not all(re.fullmatch(r"[\w.-]{1,60}", value) for value in values):
            raise BadInput(f"{name}={','.join(values)[:60]}: values with commas between them, such as {name}={SHAPES[name][1]}")
    return replace(given, rest=(*given.rest, *(f"{name}={values}" for name, values in axes.items()))), shapes


def _compare(options: TuneOptions, shapes: dict[str, list[str]]) -> int:
    """The same question for several cards and shapes, `NAMExN` for one server on N cards; the cheapest that keeps it first."""
    from plimsoll.render import tune as report
    from plimsoll.tune.answer import with_flags
    from plimsoll.tune.capacity import card_word
    from plimsoll.tune.inputs import read_prices

    if options.keep is None:
        raise BadInput("several cards or shapes are compared by what they keep: add --slo ttft=2s,tpot=50ms --keep 99")
    if (name := first_given(options, "commands", "fit", "times")) is not None:
        raise BadInput(f"{name} goes with one card and one shape")
    prices = read_prices(options.prices) if options.prices is not None else None
    named = {word: card_word(word) for word in (options.gpu or "").split(",")}
    for card, _ in named.values():
        gpu_named(card)  # a name that is not known is a mistake, before anything is replayed
    rows: list[report.CardRow] = []
    for (word, (card, cards)), values in itertools.product(named.items(), itertools.product(*shapes.values())):
        shape = dict(zip(shapes, values, strict=True))
        flags = {f"--{name.replace('_', '-')}": value for name, value in shape.items()}
        flags |= {"--tensor-parallel-size": str(cards)} if cards > 1 else {}
        words = with_flags(options.verbatim or ("vllm", "serve", options.model or ""), flags)
        named_so = " ".join([word, *(f"{SHAPES[name][0]} {value}" for name, value in shape.items())])
        try:
            rows.append((named_so, tune_one(replace(options, gpu=card, model=None, verbatim=tuple(words))), None))
        except BadInput as error:
            rows.append((named_so, None, str(error)))
    if all(found is None for _, found, _ in rows):
        raise BadInput(str(rows[0][2]))
    rows += _other_shapes(rows, options.keep, options.speedup)
    show(report.cards_as_json(rows, prices) if options.json else report.cards_as_text(rows, prices))
    return 0 if any(found is not None and found.servers is not None for _, found, _ in rows) else 1


def _other_shapes(rows: Sequence[CardRow], keep: float, speedup: float) -> list[CardRow]:
    """Rows for the same cards in other shapes: two servers on 4 cards each beside one on 8, with the flags already found."""
    from plimsoll.render.tune import TuneReport
    from plimsoll.tune.capacity import find_capacity
    from plimsoll.tune.goodput import Traffic

    kept = [(word, report, report.tuning.server.ledger) for word, report, _ in rows if report is not None and report.servers]
    cards = {(ledger.card.name, (report.servers or 0) * ledger.settings.gpus) for _, report, ledger in kept}
    found: list[CardRow] = []
    for word, report, ledger in kept:
        tuning = report.tuning
        traffic = Traffic(tuning.traffic.trace, speedup, tuning.traffic.slo)
        for name, count in sorted(cards):
            more, rest = divmod(count, ledger.settings.gpus)
            if name == ledger.card.name and more > (report.servers or 0) and not rest:
                job = tuning.server.job_of(tuning.result.best.option)
                capacity = find_capacity(traffic, job, keep, servers=more)
                same = TuneReport(tuning, report.own, report.chosen, report.second, report.notes, capacity)
                found += [(f"{word}, {more} servers", same, None)] if capacity.servers is not None else []
    return found


def tune_one(options: TuneOptions) -> TuneReport:
    """One command on one card: the best flags, and how many such servers keep the promise where that is asked."""
    from plimsoll.render.tune import TuneReport
    from plimsoll.tune.answer import runner_up, tune
    from plimsoll.tune.capacity import find_capacity
    from plimsoll.tune.goodput import Traffic
    from plimsoll.tune.inputs import read_tune_inputs
    from plimsoll.tune.runners import runner_on, with_progress

    asked = read_tune_inputs(options, options.model, options.slo)
    with bar("replaying", "runs of this round") as progress:
        run = with_progress(runner_on(options.on), progress)
        tuning = tune(asked.traffic, asked.server, asked.space, run)
        capacity, notes = None, asked.notes
        if options.keep is not None and tuning.found is not None:
            capacity = find_capacity(asked.traffic, asked.server.job_of(tuning.found.best.option), options.keep)
            if capacity.servers is not None and capacity.servers > 1:  # what is best for all of it need not be for a share
                share = Traffic(asked.traffic.trace, asked.traffic.speedup / capacity.servers, asked.traffic.slo)
                of_share = tune(share, asked.server, asked.space, run)
                if of_share.found is not None:
                    job = asked.server.job_of(of_share.found.best.option)
                    other = find_capacity(asked.traffic, job, options.keep)
                    if other.is_better_than(capacity):
                        notes = (*notes, f"the flags are chosen for the share of one of {capacity.servers} servers")
                        tuning, capacity = of_share, other
    second = runner_up(tuning)
    return TuneReport(
        tuning,
        asked.planned,
        asked.replanned(tuning.found.best.option.candidate) if tuning.found is not None else None,
        asked.replanned(second.option.candidate) if second is not None else None,
        notes,
        capacity,
    )


COMMAND = OptionsCommand("tune", TuneOptions, run, __doc__, unlisted=(TrafficOptions,))
