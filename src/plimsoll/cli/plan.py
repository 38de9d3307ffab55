"""usage: plimsoll plan --gpu NAME [options] vllm serve MODEL [any vllm flag...]

Says before launch whether a vLLM server fits its GPU, how many KV blocks remain, and what limits it. Needs no GPU, no vLLM
and, for a local folder or a bundled model, no network.

  --gpu NAME            the card: H100, L40S, A100-80G, ... (docs/gpus.md lists them); default: this machine's, through NVML
  --gpus N              how many there are; default: as many as the command needs (TP x PP x DP)
  --gpu-memory-gib X    a card that is not known, by the memory vLLM sees; with --gpu it replaces the card's total
  --used-gib X          memory that other processes hold on the card
  --vllm VERSION        default: the vLLM installed beside plimsoll, else the newest known
  --from VERSION        also what the upgrade from this version does to the flags and the KV cache
  --pid N               plan the server that runs as process N
  --workload prompt=1200,output=300,concurrency=64
                        will that many such requests fit at once, what paging saves, what block sizes waste;
                        or a trace (Azure's CSV, Mooncake's JSON lines): TRACE or TRACE:concurrency=64
  --matrix context=8k,32k,128k concurrency=8..256
                        what fits, for every combination
  --html FILE           the plan as one page for a browser, with the matrix as a heat map
  --certify             can any admitted request exceed the card (docs/certify.md); --table FILE writes what the door reads
  --compare FILE        one command a line, planned side by side; a line may begin with a --gpu (or --vllm) of its own
  --learn LOG           read the log of a real start of this command, show planned against measured, and use it next time
  --forget              forget all that was learned
  --json                one JSON object, schema plimsoll.plan/1

MODEL is a folder with config.json, a model in Hugging Face's own cache or in the bundled catalogue (docs/models.md), or any
other id, whose config.json and safetensors headers are then read from the Hugging Face hub. HF_HUB_OFFLINE=1 forbids that.
Instead of a command, a script, compose file or manifest works as well: plimsoll plan --gpu L4 start.sh

Exit codes: 0 it fits (is certified), 1 it does not, 2 your input is wrong, 3 the hub did not answer. Read on: docs/plan.md
"""

from __future__ import annotations

from datetime import UTC, datetime

from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.launch.files import read_list
from plimsoll.launch.inputs import launches_named
from plimsoll.launch.options import Split, split_options
from plimsoll.launch.recognise import Launch
from plimsoll.plan.ledger import Ledger, ModelFacts
from plimsoll.plan.matrix import Matrix, MatrixSpec, plan_matrix
from plimsoll.plan.read import PlanInput, card_of, plan_launch, read_launch
from plimsoll.plan.workload import Workload, WorkloadAnswer, judge, pool_of
from plimsoll.render import plan as report
from plimsoll.render.terminal import show, write_file

OPTIONS_WITH_VALUE = tuple(
    "--gpu --gpus --gpu-memory-gib --used-gib --vllm --from --pid --workload --matrix --html --compare --learn --table".split()
)
_SWITCHES = ("--json", "--forget", "--certify", "--help", "-h")
# What may stand in front of a line's `vllm serve` in a file that is compared; a card of its own has neighbours of its own.
OF_A_LINE = ("--gpu", "--gpus", "--gpu-memory-gib", "--used-gib", "--vllm")
_NAMES_A_CARD = frozenset({"--gpu", "--gpu-memory-gib"})
_OF_A_CARD = _NAMES_A_CARD | {"--used-gib"}


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = _with_matrix(split_options(words, with_value=OPTIONS_WITH_VALUE, switches=_SWITCHES))
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    if "--forget" in options.switches:
        from plimsoll.plan.store import forget

        show(report.forgotten(forget(), is_json="--json" in options.switches))
        return 0
    if "--learn" in options.values:
        return _learn(options)
    if "--compare" in options.values:
        return compare(options)
    named = launches_named(options, "plan")
    plan_input = read_launch(options, *named[0])
    if len(named) > 1:
        file = "FILE" if options.rest[:1] in ((), ("-",)) else options.rest[0]
        first = f"{len(named)} vLLM starts were found and this is the first, {named[0][0].source}"
        note = f"{first}; --compare {file} plans them all, side by side"
        plan_input = plan_input._replace(notes=(note, *plan_input.notes))
    if "--certify" in options.switches or "--table" in options.values:
        return run_certify(options, plan_input)
    plan = plan_input.plan()
    answer, matrix = _workload(options, plan.ledger, plan_input.model), _matrix(options, plan_input)
    if "--html" in options.values:
        from plimsoll.render.plan_html import as_html

        write_file(options.values["--html"], as_html(plan, matrix=matrix, workload=answer))
    show((report.as_json if "--json" in options.switches else report.as_text)(plan, matrix, answer))
    return 0 if plan.fits and (answer is None or answer.verdict.is_fine) else 1


def _with_matrix(options: Split) -> Split:
    """`--matrix context=8k,32k concurrency=8..64` is one value in two words."""
    if "--matrix" not in options.values:
        return options
    more = [word for word in options.rest if word.partition("=")[0] in ("context", "concurrency")]
    values = {**options.values, "--matrix": " ".join([options.values["--matrix"], *more])}
    return options._replace(values=values, rest=tuple(word for word in options.rest if word not in more))


def _learn(options: Split) -> int:
    """What a real start of this command printed, beside what was planned; kept for the next plan."""
    from plimsoll.plan.learned import compare, correction_from, key_of
    from plimsoll.plan.store import read_start, store

    measured = read_start(options.values["--learn"])
    plan_input = read_launch(options, *launches_named(options, "plan")[0], learned=False)
    ledger, _ = plan_input.replan(plan_input.settings)
    store(key_of(ledger, plan_input.model.shape), correction_from(ledger, measured))
    shown = report.learned_as_json if "--json" in options.switches else report.learned_as_text
    show(shown(compare(ledger, measured)))
    return 0


def _workload(options: Split, ledger: Ledger, model: ModelFacts) -> WorkloadAnswer | None:
    if "--workload" not in options.values:
        return None
    text = options.values["--workload"]
    path, _, wish = text.partition(":concurrency=")
    if "=" in path:
        return judge(Workload.parse(text), pool_of(ledger, model))
    from plimsoll.simulate.trace_files import read_lengths

    if wish and not wish.isdigit():
        raise BadInput(f"--workload {text!r}: the concurrency is a number")
    return judge(Workload.from_trace(read_lengths(path), int(wish) if wish else None), pool_of(ledger, model))


def _matrix(options: Split, plan_input: PlanInput) -> Matrix | None:
    if "--matrix" not in options.values:
        return None
    spec, longest = MatrixSpec.parse(options.values["--matrix"]), plan_input.model.shape.max_context
    return plan_matrix(spec, plan_input.settings, lambda changed: plan_input.replan(changed)[0], longest=longest)


def run_certify(options: Split, plan_input: PlanInput) -> int:
    """Certify the command, print the answer and write the door's table where one was asked for."""
    from plimsoll.render import certify

    if "--certify" not in options.switches:
        raise BadInput("--table writes a certificate's table: it stands beside --certify")
    beside = [name for name in ("--workload", "--matrix", "--html") if name in options.values]
    if beside:
        raise BadInput(f"--certify answers one question; {beside[0]} beside it asks another")
    certificate = plan_input.certify()
    if "--table" in options.values:
        made = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            write_file(options.values["--table"], certify.table_json(certificate, plan_input.model.name, made))
        except WorldFailed as error:
            raise BadInput(f"--table {error}") from None
    shown = certify.as_json if "--json" in options.switches else certify.as_text
    show(shown(certificate, plan_input.model.name, plan_input.notes))
    return 0 if certificate.certified else 1


def compare(options: Split) -> int:
    """Plan every start in the file; one that cannot be planned says why in its place."""
    path = options.values["--compare"]
    beside = (*options.rest, *(options.verbatim or ()))
    if beside:
        raise BadInput(f"--compare {path} names the file that holds the commands; {beside[0]!r} stands beside it")
    launches, notes = read_list(path)
    if not all(_NAMES_A_CARD & {word.partition("=")[0] for word in launch.in_front} for launch in launches):
        card_of(options)  # a card that is missing or unknown is said once, not for each line
    rows = []
    for launch in launches:
        try:
            rows.append(report.ComparedPlan(launch.source, plan_launch(_options_of(options, launch), launch, "")))
        except PlimsollError as error:
            rows.append(report.ComparedPlan(launch.source, None, str(error)))
    show((report.compare_as_json if "--json" in options.switches else report.compare_as_text)(rows, notes))
    return 0 if all(row.plan is not None and row.plan.fits for row in rows) else 1


def _options_of(options: Split, launch: Launch) -> Split:
    """The options for one line: its own go before those that were typed."""
    own = split_options(launch.in_front, with_value=OF_A_LINE, switches=())
    if own.rest or own.verbatim is not None:
        raise BadInput(f"`{' '.join(launch.in_front)}`: in front of a command only {', '.join(OF_A_LINE)} can stand")
    other_card = bool(own.values.keys() & _NAMES_A_CARD)
    typed = {name: value for name, value in options.values.items() if not (other_card and name in _OF_A_CARD)}
    return options._replace(values={**typed, **own.values})
