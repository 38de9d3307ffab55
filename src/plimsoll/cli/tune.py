"""usage: plimsoll tune TRACE... --model MODEL --gpu NAME [--slo ttft=2s,tpot=50ms] [--fit RUN] [options]
       plimsoll tune TRACE... --gpu NAME [options] -- vllm serve MODEL [any vllm flag...]

Finds the flags that serve this traffic best on this card: --max-num-seqs, --max-num-batched-tokens, --block-size and
--gpu-memory-utilization. Plan says which settings are safe and how large a cache each leaves, simulate what the traffic does in
it. Best means: most requests a second that are served as promised.

TRACE is a file as for `plimsoll simulate`, the folder of the recorder (docs/inside.md), `-`, or synthetic:...

What is promised, and to whom:
  --slo ttft=2s,tpot=50ms   first token within, each further token within, e2e=30s the last; default: being served is enough
  --limit N  --from-s S  --until-s S  --speedup X  --skip-bad  --trace-block-size N  --rate X ...   as for simulate
The server:
  --model MODEL, or a whole command after `--`;  --gpu, --gpus, --gpu-memory-gib, --used-gib, --vllm   as for plan
  --fit RUN             learn step times from a recording of this very server with these very flags (docs/step-time.md): then
                        the answer is a recommendation. Without: ranges, and what to measure. --times FILE: learnt before
What is looked at:
  max_num_seqs=8..512 max_num_batched_tokens=512,2k,8k block_size=16,32 gpu_memory_utilization=0.85..0.95
How:
  --on ray              runs on a Ray cluster (ray://HOST:PORT, or one of this machine); default: all cores here
  --into FILE           keeps each run; a second call does only what is missing
  --last TUNING.json    what an earlier call wrote with --json: says what has changed since
What is written:
  --json                one object, schema plimsoll.tune/1: feeds `simulate --plan` and `assets --plan`
  --commands FILE       the chosen command, the runner-up and your own, one a line: for `plimsoll plan --compare FILE`
  --html FILE           a page with the curves

Exit codes: 0 an answer, 1 no setting is safe or none serves a single request as promised, 2 your input is wrong, 3 something
outside failed.
Read on: docs/tune.md
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from plimsoll.cli.simulate import checked_words, say_compiling
from plimsoll.errors import BadInput
from plimsoll.launch.options import Split, split_options
from plimsoll.render.terminal import bar, show, write_file

if TYPE_CHECKING:
    from plimsoll.render.tune import TuneReport

_WITH_VALUE = (
    "--model --gpu --gpus --gpu-memory-gib --used-gib --vllm --slo --fit --fit-series --times --save-times --limit --from-s "
    "--until-s --speedup --trace-block-size --rate --arrivals --burstiness --seed --on --into --last --html --commands"
).split()
_SWITCHES = ("--skip-bad", "--json", "--help", "-h")


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = split_options(words, with_value=_WITH_VALUE, switches=_SWITCHES)
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    checked_words(options, "tune", written=("--html", "--commands", "--save-times", "--into"))
    from plimsoll.simulate.compiled import telling

    with telling(say_compiling):
        shown = _tune(options)
    from plimsoll.render import tune as report

    if "--commands" in options.values:
        write_file(options.values["--commands"], "".join(f"{line}\n" for line in report.commands(shown)))
    if "--html" in options.values:
        from plimsoll.render.tune_html import page

        write_file(options.values["--html"], page(shown))
    show(report.as_json(shown) if "--json" in options.switches else report.as_text(shown))
    found = shown.tuning.found
    return 0 if found is not None and found.best.score.met else 1


def _tune(options: Split) -> TuneReport:
    from plimsoll.render.tune import TuneReport
    from plimsoll.tune.answer import runner_up, tune
    from plimsoll.tune.inputs import kept_in, read_tune_inputs, simulator_version
    from plimsoll.tune.runners import remembering, runner_on

    if options.verbatim is None and "--model" not in options.values:
        raise BadInput("which model? plimsoll tune TRACE --model MODEL --gpu NAME, or a whole command after `--`")
    asked = read_tune_inputs(options)
    with ExitStack() as stack:
        kept = kept_in(options, stack)
        progress = stack.enter_context(bar("replaying", "runs of this round"))
        run = remembering(runner_on(options.values.get("--on")), kept, simulator_version(), progress)
        tuning = tune(asked.traffic, asked.server, asked.space, run, asked.last)
    second = runner_up(tuning)
    return TuneReport(
        tuning,
        asked.planned,
        asked.replanned(tuning.found.best.option.candidate) if tuning.found is not None else None,
        asked.replanned(second.option.candidate) if second is not None else None,
        asked.notes,
    )
