"""usage: plimsoll plan --gpu NAME [options] vllm serve MODEL [any vllm flag...]

Says before launch whether a vLLM server fits its GPU, how many KV blocks remain, and what limits it. Needs no GPU, no vLLM
and, for a local folder or a bundled model, no network.

{options}

MODEL is a folder with config.json, a model in Hugging Face's own cache or in the bundled catalogue (docs/models.md), or any
other id, whose config.json and safetensors headers are then read from the Hugging Face hub. HF_HUB_OFFLINE=1 forbids that.
Instead of a command, a script, compose file or manifest works as well: plimsoll plan --gpu L4 start.sh

Exit codes: 0 it fits (is certified) or that cannot be told from here, 1 it does not, 2 your input is wrong, 3 the hub did not
answer. Read on: docs/plan.md
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from plimsoll.cli.main import OptionsCommand, parse
from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.launch.command_line import Launch, launches_named
from plimsoll.launch.files import read_list
from plimsoll.launch.options import first_given, option, options_of, pid_of, switch
from plimsoll.plan.options import ServerOptions
from plimsoll.plan.read import PlanInput, card_of, plan_launch, read_launch
from plimsoll.plan.workload import MatrixSpec, Workload, judge, plan_matrix, pool_of
from plimsoll.render import plan as report
from plimsoll.render.terminal import show, write_file
from plimsoll.vllm.versions import releases


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ServerOptions):
    came_from: str | None = option(
        "VERSION", "also what the upgrade from this version does to the flags and the KV cache", name="--from", offers=releases
    )
    pid: int | None = option("N", "plan the server that runs as process N", read=pid_of)
    workload: str | None = option(
        "prompt=1200,output=300,concurrency=64",
        "will that many such requests fit at once, what paging saves, what block sizes waste; or a trace (Azure's CSV, "
        "Mooncake's JSON lines): TRACE or TRACE:concurrency=64",
    )
    matrix: str | None = option("context=8k,32k,128k concurrency=8..256", "what fits, for every combination")
    html: str | None = option("FILE", "the plan as one page for a browser, with the matrix as a heat map")
    certify: bool = switch("can any admitted request exceed the card (docs/certify.md)?")
    table: str | None = option("FILE", "of a certificate: what the door reads")
    compare: str | None = option(
        "FILE", "one command a line, planned side by side; a line may begin with its own --gpu or --vllm"
    )
    learn: str | None = option("LOG", "the log of a real start of this command: planned against measured, and used next time")
    forget: bool = switch("forget all that was learned")
    json: bool = switch("one JSON object, schema plimsoll.plan/1")


def run(options: PlanOptions) -> int:
    if options.matrix is not None:  # its value may be two words
        more = [word for word in options.rest if word.partition("=")[0] in ("context", "concurrency")]
        rest = tuple(word for word in options.rest if word not in more)
        options = replace(options, matrix=" ".join([options.matrix, *more]), rest=rest)
    if options.forget:
        from plimsoll.plan.store import forget

        show(report.forgotten(forget(), is_json=options.json))
        return 0
    if options.learn is not None:
        return _learn(options, options.learn)
    if options.compare is not None:
        return compare(options, options.compare)
    named = launches_named(options, "plan")
    plan_input = read_launch(options, *named[0])
    if len(named) > 1:
        file = "FILE" if options.rest[:1] in ((), ("-",)) else options.rest[0]
        first = f"{len(named)} vLLM starts were found and this is the first, {named[0][0].source}"
        note = f"{first}; --compare {file} plans them all, side by side"
        plan_input = replace(plan_input, notes=(note, *plan_input.notes))
    if options.certify or options.table is not None:
        return run_certify(options, plan_input)
    asked = "--workload" if options.workload is not None else "--matrix" if options.matrix is not None else ""
    if asked and plan_input.model.shape.is_encoder_decoder:
        raise BadInput(
            f"{asked}: how many requests of an encoder-decoder model fit is not known: no cross-attention is counted"
        )
    plan = plan_input.plan()
    answer = None
    if options.workload is not None:
        path, _, wish = options.workload.partition(":concurrency=")
        if "=" in path:
            load = Workload.parse(options.workload)
        else:
            from plimsoll.simulate.trace_files import read_lengths

            if wish and not wish.isdigit():
                raise BadInput(f"--workload {options.workload!r}: the concurrency is a number")
            load = Workload.from_trace(read_lengths(path), int(wish) if wish else None)
        answer = judge(load, pool_of(plan.ledger, plan_input.model))
    matrix = None
    if options.matrix is not None:
        spec, longest = MatrixSpec.parse(options.matrix), plan_input.model.shape.max_context
        matrix = plan_matrix(spec, plan_input.settings, lambda changed: plan_input.replan(changed)[0], longest=longest)
    if options.html is not None:
        from plimsoll.render.html import plan_page

        write_file(options.html, plan_page(plan, matrix=matrix, workload=answer))
    show((report.as_json if options.json else report.as_text)(plan, matrix, answer))
    return 0 if (plan.fits and (answer is None or answer.verdict.is_fine)) or (plan.is_undecided and answer is None) else 1


def _learn(options: PlanOptions, log: str) -> int:
    """What a real start of this command printed, beside what was planned; kept for the next plan."""
    from plimsoll.plan.learned import compare, correction_from, key_of
    from plimsoll.plan.store import read_start, store

    measured = read_start(log)
    plan_input = read_launch(options, *launches_named(options, "plan")[0], learned=False)
    ledger, _ = plan_input.replan(plan_input.settings)
    store(key_of(ledger, plan_input.model.shape), correction_from(ledger, measured))
    show((report.learned_as_json if options.json else report.learned_as_text)(compare(ledger, measured)))
    return 0


def run_certify(options: PlanOptions, plan_input: PlanInput) -> int:
    """Certify the command, print the answer and write the door's table where one was asked for."""
    from plimsoll.render import certify

    if not options.certify:
        raise BadInput("--table writes a certificate's table: it stands beside --certify")
    if (beside := first_given(options, "workload", "matrix", "html")) is not None:
        raise BadInput(f"--certify answers one question; {beside} beside it asks another")
    certificate = plan_input.certify()
    if options.table is not None:
        made = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            write_file(options.table, certify.table_json(certificate, plan_input.model.name, made))
        except WorldFailed as error:
            raise BadInput(f"--table {error}") from None
    show((certify.as_json if options.json else certify.as_text)(certificate, plan_input.model.name, plan_input.notes))
    return 0 if certificate.certified else 1


def compare(options: PlanOptions, path: str) -> int:
    """Plan every start in the file; one that cannot be planned says why in its place."""
    if beside := (*options.rest, *(options.verbatim or ())):
        raise BadInput(f"--compare {path} names the file that holds the commands; {beside[0]!r} stands beside it")
    launches, notes = read_list(path)
    if not all({"--gpu", "--gpu-memory-gib"} & {word.partition("=")[0] for word in launch.in_front} for launch in launches):
        card_of(options)  # a card that is missing or unknown is said once, not for each line
    rows = []
    for launch in launches:
        try:
            rows.append(report.ComparedPlan(launch.source, plan_launch(_options_of(options, launch), launch, "")))
        except PlimsollError as error:
            rows.append(report.ComparedPlan(launch.source, None, str(error)))
    show((report.compare_as_json if options.json else report.compare_as_text)(rows, notes))
    return 0 if all(row.plan is not None and (row.plan.fits or row.plan.is_undecided) for row in rows) else 1


def _options_of(options: PlanOptions, launch: Launch) -> PlanOptions:
    """The options for one line: its own go before those that were typed; a card of its own has neighbours of its own."""
    own = parse(ServerOptions, launch.in_front)
    if own.rest or own.verbatim is not None:
        allowed = ", ".join(info.name for info in options_of(ServerOptions).values())
        raise BadInput(f"`{' '.join(launch.in_front)}`: in front of a command only {allowed} can stand")
    if own.gpu is not None or own.gpu_memory_gib is not None:
        options = replace(options, gpu=None, gpu_memory_gib=None, used_gib=0)
    return replace(options, **{field: value for field in options_of(own) if (value := getattr(own, field))})


COMMAND = OptionsCommand("plan", PlanOptions, run, __doc__, is_open=True)
