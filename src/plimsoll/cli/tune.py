"""usage: plimsoll tune TRACE... --model MODEL --gpu NAME [--slo ttft=2s,tpot=50ms] [--fit RUN] [options]
       plimsoll tune TRACE... --gpu NAME [options] -- vllm serve MODEL [any vllm flag...]

Finds the flags that serve this traffic best on this card: --max-num-seqs, --max-num-batched-tokens, --block-size and
--gpu-memory-utilization. Plan says which settings are safe and how large a cache each leaves, simulate what the traffic does in
it. Best means: most requests a second that are served as promised.

TRACE is a file as for `plimsoll simulate`, the folder of the recorder (docs/inside.md), `-`, or synthetic:...

The traffic: --limit, --from-s, --until-s, --speedup, --skip-bad, --trace-block-size, --rate, ... as for simulate. The server:
--gpu, --gpus, --gpu-memory-gib, --used-gib, --vllm as for plan.

What is looked at:
  max_num_seqs=8..512 max_num_batched_tokens=512,2k,8k block_size=16,32 gpu_memory_utilization=0.85..0.95

{options}

Exit codes: 0 an answer, 1 no setting is safe or none serves a single request as promised, 2 your input is wrong, 3 something
outside failed.
Read on: docs/tune.md
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plimsoll.cli.main import OptionsCommand
from plimsoll.cli.simulate import check_words, say_compiling
from plimsoll.errors import BadInput
from plimsoll.launch.options import option, switch
from plimsoll.render.terminal import bar, show, write_file
from plimsoll.simulate.options import TrafficOptions, file_named

if TYPE_CHECKING:
    from plimsoll.render.tune import TuneReport


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TrafficOptions):
    """The options of `plimsoll tune`."""

    slo: str | None = option("ttft=2s,tpot=50ms", "first token, each further token, e2e=30s the last; default: being served")
    model: str | None = option("MODEL", "or a whole command after `--`")
    fit: str | None = option(
        "RUN", "learn step times from a recording of this very server and flags (docs/step-time.md): then the answer is "
        "a recommendation. Without: ranges, and what to measure. --times FILE: learnt before",
    )  # fmt: skip
    on: str | None = option("ray", "runs on a Ray cluster (ray://HOST:PORT, or one of this machine); default: all cores here")
    into: str | None = option("FILE", "keeps each run; a second call does only what is missing", read=file_named)
    last: str | None = option("TUNING.json", "what an earlier call wrote with --json: says what has changed since")
    json: bool = switch("one object, schema plimsoll.tune/1: feeds `simulate --plan` and `assets --plan`")
    commands: str | None = option("FILE", "what was chosen, second and yours: for `plan --compare FILE`", read=file_named)
    html: str | None = option("FILE", "a page with the curves", read=file_named)


def run(options: TuneOptions) -> int:
    """Read, think, render, exit code."""
    check_words(options, "tune", written=("html", "commands", "save_times", "into"))
    from plimsoll.simulate.compiled import telling

    with telling(say_compiling):
        shown = _tune(options)
    from plimsoll.render import tune as report

    if options.commands is not None:
        write_file(options.commands, "".join(f"{line}\n" for line in report.commands(shown)))
    if options.html is not None:
        from plimsoll.render.html import tune_page

        write_file(options.html, tune_page(shown))
    show(report.as_json(shown) if options.json else report.as_text(shown))
    found = shown.tuning.found
    return 0 if found is not None and found.best.score.met else 1


def _tune(options: TuneOptions) -> TuneReport:
    from plimsoll.render.tune import TuneReport
    from plimsoll.tune.answer import runner_up, tune
    from plimsoll.tune.inputs import kept_in, read_tune_inputs, simulator_version
    from plimsoll.tune.runners import remembering, runner_on

    if options.verbatim is None and options.model is None:
        raise BadInput("which model? plimsoll tune TRACE --model MODEL --gpu NAME, or a whole command after `--`")
    asked = read_tune_inputs(options, options.model, options.slo, options.last)
    with ExitStack() as stack:
        kept = kept_in(options.into, stack)
        progress = stack.enter_context(bar("replaying", "runs of this round"))
        run = remembering(runner_on(options.on), kept, simulator_version(), progress)
        tuning = tune(asked.traffic, asked.server, asked.space, run, asked.last)
    second = runner_up(tuning)
    return TuneReport(
        tuning,
        asked.planned,
        asked.replanned(tuning.found.best.option.candidate) if tuning.found is not None else None,
        asked.replanned(second.option.candidate) if second is not None else None,
        asked.notes,
    )


COMMAND = OptionsCommand("tune", TuneOptions, run, __doc__, unlisted=(TrafficOptions,))
