"""usage: plimsoll whatif "CHANGE..." TRACE... [--gpu NAME] [options] [-- vllm serve MODEL ...]
       plimsoll whatif "CHANGE..." --from-guard URL [--gpu NAME] [options] -- vllm serve MODEL ...

Replays a recording as it was and as it would be: with other flags, another card, more or fewer engines, more traffic. The
server that was recorded stands after `--`, with its card in --gpu; the changes come first:

  replicas=3, replicas=+1, replicas=-1    so many engines, or more or fewer than --replicas (with --from-guard: than recorded)
  rate=2x                                 requests come twice as fast
  gpu=L40S, gpu=L40Sx2                    another card, or one server on two of them
  router=gateway                          another router before several engines
  max_num_seqs=64                         any flag of vllm serve by its name; without a command those of `plimsoll simulate`

TRACE is a file as for `plimsoll simulate`, or the recorder's folder. All options of `plimsoll simulate` but its files.

{options}

Exit codes: 0 an answer, 2 your input is wrong, 3 something outside failed.
Read on: docs/whatif.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.cli.main import OptionsCommand
from plimsoll.cli.simulate import check_words, recorded_by_guard, replay_engines, say_compiling
from plimsoll.errors import BadInput
from plimsoll.launch.options import decimal, option, switch, whole
from plimsoll.render.terminal import bar, show
from plimsoll.simulate.options import ROUTERS, FleetOptions, ReplayOptions

if TYPE_CHECKING:
    from plimsoll.render.whatif import ReplayOutcome
    from plimsoll.simulate.replay import Replay
    from plimsoll.tune.goodput import Slo

_WORD = re.compile(r"([A-Za-z][\w-]*)=(\S+)")
ENGINE = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_token_threshold")
OTHER_CARD = "what was fitted is of the recorded card; the other card's steps take what measured kernels or its data sheet say"


@dataclass(frozen=True, kw_only=True)
class WhatifOptions(FleetOptions):
    slo: str | None = option("ttft=2s,tpot=50ms", "what is promised: how many requests are served so", heading="What is asked")
    json: bool = switch("one object, schema plimsoll.whatif/1")


def run(options: WhatifOptions) -> int:
    check_words(options, "whatif", written=("save_times",))
    from plimsoll.render import whatif as report
    from plimsoll.simulate.compiled import telling
    from plimsoll.tune.goodput import Slo, parse_slo

    changes, traces = split_changes(options.rest)
    if not changes:
        raise BadInput('what if what? plimsoll whatif "replicas=3 gpu=L40S rate=2x" TRACE ...; --help lists the changes')
    slo = Slo() if options.slo is None else parse_slo(options.slo)
    with telling(say_compiling), recorded_by_guard(replace(options, rest=traces)) as (recorded, engines):
        base = replace(recorded, replicas=recorded.replicas or engines or None)
        was = _outcome("as recorded", base, slo)
        base = replace(base, replicas=was.replicas)
        found = _outcome("what if", changed(base, changes), slo)
        if "gpu" in changes and (base.fit or base.times):
            found = replace(found, notes=(*found.notes, OTHER_CARD))
        measured = report.measured_outcome(base, slo)
    answer = report.WhatifReport(changes, was, found, measured, slo)
    show(report.as_json(answer) if options.json else report.as_text(answer))
    return 0


def split_changes(words: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    """`name=value` words, several in one argument or each in its own, apart from traces; a file of such a name is a trace."""
    changes: dict[str, str] = {}
    traces = []
    for word in words:
        parts = [_WORD.fullmatch(part) for part in word.replace(",", " ").split()]
        if not parts or not all(parts) or Path(word).exists():
            traces.append(word)
            continue
        for part in parts:
            assert part is not None
            name = part[1].lower().replace("-", "_")
            if name in changes:
                raise BadInput(f"{name}= is given twice")
            changes[name] = part[2]
    return changes, tuple(traces)


def changed(base: WhatifOptions, changes: dict[str, str]) -> WhatifOptions:
    """The options of the replay with these changes; BadInput for one that cannot be."""
    from plimsoll.tune.answer import with_flags
    from plimsoll.tune.capacity import card_word

    options, flags = base, dict[str, str]()
    for name, value in changes.items():
        if name == "replicas":
            sign = value[0] if value[0] in "+-" else ""
            number = whole(value.removeprefix(sign), "replicas=", 0, 1000)
            before = base.replicas or 1
            number = before + number if sign == "+" else before - number if sign == "-" else number
            if not 1 <= number <= 1000:
                raise BadInput(f"replicas={value}: {number} of {before} engines would be left; from 1 to 1000 can be replayed")
            options = replace(options, replicas=number)
        elif name in ("rate", "speedup"):
            times = decimal(value.removesuffix("x"), f"{name}=")
            if not 0 < times <= 1e6:
                raise BadInput(f"{name}={value[:40]}: 2x is twice as fast, 0.5x half")
            options = replace(options, speedup=base.speedup * times)
        elif name == "router":
            if value not in ROUTERS:
                raise BadInput(f"router={value[:40]}: there is {', '.join(ROUTERS)}")
            options = replace(options, router=value)
        elif base.verbatim is None:
            options = replace(options, **{name: _engine_option(name, value)})  # type: ignore[arg-type]
        elif name == "gpu":
            card, cards = card_word(value)
            options = replace(options, gpu=card, gpu_memory_gib=None, fit=None, fit_series=None, times=None, save_times=None)
            flags |= {"--tensor-parallel-size": str(cards)} if cards > 1 else {}
        else:
            flags["--" + name.replace("_", "-")] = value
    return replace(options, verbatim=tuple(with_flags(options.verbatim, flags))) if options.verbatim and flags else options


def _engine_option(name: str, value: str) -> object:
    """A value for one of simulate's own options, where no command was given."""
    if name not in ENGINE:
        needs = f"{name}= needs the recorded server: --gpu NAME -- vllm serve MODEL ..."
        raise BadInput(f"{needs}; without one there is replicas, rate, router, {', '.join(ENGINE)}")
    return whole(value, f"{name}=")


def _outcome(name: str, options: WhatifOptions, slo: Slo) -> ReplayOutcome:
    from plimsoll.render.whatif import ReplayOutcome
    from plimsoll.simulate.inputs import read_inputs
    from plimsoll.simulate.replay import replay
    from plimsoll.simulate.summary import summarise
    from plimsoll.tune.goodput import score

    given = read_inputs(options)
    replicas = given.engines.number

    def replayed(factor: float) -> Replay:
        if replicas > 1:
            return replay_engines(given, factor)[0]
        with bar("replaying", "requests") as progress:
            return replay(given.trace, given.settings, given.step_time.scaled(factor), given.speedup, on_progress=progress)

    found = replayed(1.0)
    ends = [replayed(factor) for factor in given.band if factor != 1.0]
    return ReplayOutcome(
        name,
        summarise(found, fitted=given.fitted, is_poor=given.is_poor),
        replicas,
        score(found, slo).met,
        options.gpu or "",
        given.band,
        tuple((score(end, slo).met, summarise(end).e2e.mean or 0.0) for end in ends),
        given.notes,
    )


COMMAND = OptionsCommand("whatif", WhatifOptions, run, __doc__, unlisted=(ReplayOptions,))
