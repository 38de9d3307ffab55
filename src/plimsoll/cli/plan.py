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

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from plimsoll.errors import BadInput, PlimsollError, WorldFailed
from plimsoll.hardware.cards import Vendor, gpu_named
from plimsoll.launch.arguments import config_of, launches_named
from plimsoll.launch.check_flags import Checked, check, with_config
from plimsoll.launch.command_line import read_command_line
from plimsoll.launch.options import Split, split_options
from plimsoll.launch.rewrite import LEFT_OUT
from plimsoll.models.shape import ModelShape
from plimsoll.plan.certify import Certificate, Kind, Question, assumptions_of, certify, smallest_request
from plimsoll.plan.certify_terms import RequestLimits, read_limits
from plimsoll.plan.findings import stops_the_start
from plimsoll.plan.ledger import Card, ModelFacts
from plimsoll.plan.settings import AUTO_FIT, Flags
from plimsoll.render.terminal import show, write_file
from plimsoll.units import GIB, Estimate, format_count, format_gib, parse_gib
from plimsoll.vllm.versions import Engine, engine_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plimsoll.findings import Finding
    from plimsoll.launch.launches import Launch
    from plimsoll.models.folders import ModelFiles
    from plimsoll.plan.ledger import Ledger
    from plimsoll.plan.matrix import Matrix
    from plimsoll.plan.settings import Settings
    from plimsoll.plan.workload import WorkloadAnswer
    from plimsoll.render.plan import Planned


MOST_MEMORY = 1024 * GIB  # beyond what any card has: a figure in MiB, most likely
MLA_SINCE = "0.7.1"  # the first release that caches latents for DeepSeek's attention
OPTIONS_WITH_VALUE = tuple(
    "--gpu --gpus --gpu-memory-gib --used-gib --vllm --from --pid --workload --matrix --html --compare --learn --table".split()
)
_SWITCHES = ("--json", "--forget", "--certify", "--help", "-h")


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = _with_matrix(split_options(words, with_value=OPTIONS_WITH_VALUE, switches=_SWITCHES))
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    if "--forget" in options.switches:
        return _forget(options)
    if "--learn" in options.values:
        return _learn(options)
    if "--compare" in options.values:
        return compare(options)
    named = launches_named(options, "plan")
    ready = _read_one(options, *named[0])
    ready = ready._replace(notes=(*_others_in_file(options, named), *ready.notes))
    if "--certify" in options.switches or "--table" in options.values:
        return run_certify(options, ready)
    planned = planned_from(ready)
    answer, matrix = _workload(options, planned.ledger, ready.model), _matrix(options, ready)
    if "--html" in options.values:
        from plimsoll.render.plan_html import as_html

        write_file(options.values["--html"], as_html(planned, matrix=matrix, workload=answer))
    from plimsoll.render import plan as report

    show((report.as_json if "--json" in options.switches else report.as_text)(planned, matrix, answer))
    return 0 if planned.fits and (answer is None or answer.verdict.is_fine) else 1


def _others_in_file(options: Split, named: list[tuple[Launch, str]]) -> tuple[str, ...]:
    """A file with several starts: which of them this is, and how to see all."""
    if len(named) < 2:
        return ()
    file = "FILE" if options.rest[:1] in ((), ("-",)) else options.rest[0]
    first = f"{len(named)} vLLM starts were found and this is the first, {named[0][0].source}"
    return (f"{first}; --compare {file} plans them all, side by side",)


def planned_of(options: Split) -> Planned:
    """The plan of the command after `--`, for `doctor`: nothing is printed."""
    return planned_launch(options, *launches_named(options, "plan")[0], learned=False)


def plan_as_json(options: Split) -> str:
    """The plan of the command after `--`, for `simulate`."""
    from plimsoll.render import plan as report

    return report.as_json(planned_launch(options, *launches_named(options, "plan")[0]), None, None)


def _with_matrix(options: Split) -> Split:
    """`--matrix context=8k,32k concurrency=8..64` is one value in two words."""
    if "--matrix" not in options.values:
        return options
    more = [word for word in options.rest if word.partition("=")[0] in ("context", "concurrency")]
    values = {**options.values, "--matrix": " ".join([options.values["--matrix"], *more])}
    return options._replace(values=values, rest=tuple(word for word in options.rest if word not in more))


def planned_launch(options: Split, launch: Launch, folder: str, *, learned: bool = True) -> Planned:
    """The plan of a start that was found already."""
    return planned_from(_read_one(options, launch, folder, learned=learned))


def _read_one(options: Split, launch: Launch, folder: str, *, learned: bool = True) -> Ready:
    checked, engine, gpus = _checked(options, launch, folder)
    return _ready(checked, engine, card_of(options), learned=learned, gpus=gpus)


def _checked(options: Split, launch: Launch, folder: str) -> tuple[Checked, Engine, int | None]:
    engine = engine_named(options.values.get("--vllm") or installed_vllm())
    came_from = engine_named(options.values["--from"], "--from") if "--from" in options.values else None
    checked = check(launch, engine, came_from, config_of(launch, folder))
    gpus = options.values.get("--gpus")
    if gpus is not None and (not gpus.isascii() or not gpus.isdigit()):
        raise BadInput(f"--gpus {gpus!r} is not a number")
    return checked, engine, int(gpus) if gpus else None


def _forget(options: Split) -> int:
    from plimsoll.plan.store import forget
    from plimsoll.render.plan import forgotten

    show(forgotten(forget(), is_json="--json" in options.switches))
    return 0


def _learn(options: Split) -> int:
    """What a real start of this command printed, beside what was planned; kept for the next plan."""
    from plimsoll.plan.learned import compare, correction_from, key_of
    from plimsoll.plan.store import read_start, store
    from plimsoll.render import plan

    measured = read_start(options.values["--learn"])
    ready = _read_one(options, *launches_named(options, "plan")[0], learned=False)
    ledger, _ = ready.replan(ready.settings)
    store(key_of(ledger, ready.model.shape), correction_from(ledger, measured))
    differences = compare(ledger, measured)
    show(plan.learned_as_json(differences) if "--json" in options.switches else plan.learned_as_text(differences))
    return 0


def _workload(options: Split, ledger: Ledger, model: ModelFacts) -> WorkloadAnswer | None:
    if "--workload" not in options.values:
        return None
    from plimsoll.plan.workload import Workload, judge

    text = options.values["--workload"]
    path, _, wish = text.partition(":concurrency=")
    if "=" in path:
        return judge(Workload.parse(text), ledger, model)
    from plimsoll.simulate.trace_files import read_lengths

    if wish and not wish.isdigit():
        raise BadInput(f"--workload {text!r}: the concurrency is a number")
    return judge(Workload.from_trace(read_lengths(path), int(wish) if wish else None), ledger, model)


def _matrix(options: Split, ready: Ready) -> Matrix | None:
    if "--matrix" not in options.values:
        return None
    from plimsoll.plan.matrix import MatrixSpec, plan_matrix

    return plan_matrix(
        MatrixSpec.parse(options.values["--matrix"]),
        ready.settings,
        lambda changed: ready.replan(changed)[0],
        longest=ready.model.shape.max_context,
    )


class Ready(NamedTuple):
    """A command that was read, with all that is needed to plan it, and to plan it again with other settings."""

    checked: Checked
    model: ModelFacts
    settings: Settings
    replan: Callable[[Settings], tuple[Ledger, list[Finding]]]
    notes: tuple[str, ...]


def ready_of(options: Split, *, learned: bool = True) -> Ready:
    """The command after `--`, for `tune` and `sweep`, which plan it many times."""
    return _read_one(options, *launches_named(options, "tune")[0], learned=learned)


def planned_from(ready: Ready) -> Planned:
    """Its plan, with findings and advice."""
    from plimsoll.plan.advise import advise
    from plimsoll.render.plan import Planned

    ledger, findings = ready.replan(ready.settings)
    advice = advise(ledger, ready.model.shape, findings, ready.replan)
    before = _before(ready.checked, ready.model, ledger.card)
    return Planned(ready.model.name, ledger, findings, advice, ready.checked, ready.model.shape, ready.notes, before)


def _ready(checked: Checked, engine: Engine, card: Card, *, learned: bool, gpus: int | None) -> Ready:
    from plimsoll.plan.findings import findings_of
    from plimsoll.plan.ledger import plan_ledger
    from plimsoll.plan.settings import overrides_of, read_settings, revision_of
    from plimsoll.plan.store import read_corrections

    if checked.model is None:
        raise BadInput("the command names no model")
    line = read_command_line(checked.rewritten[2:], engine.release, unseen=checked.unseen)
    line = with_config(line, checked.config, engine)
    model, notes = _model(checked.model, revision_of(line, engine.release), overrides_of(line, engine.release))
    _check_era(model.shape, engine.release)
    environment = dict(checked.launch.environment)
    settings = read_settings(line, checked.launch.environment, engine.release, model.shape, card.name, card.total_bytes)
    model, left_out = _with_drafter(model, settings)

    # What was learned of the model alone says nothing of it with a drafter beside it.
    corrections = read_corrections() if learned and model.drafter is None else {}

    def replan(changed: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(model, changed, card)
        if corrections:
            from plimsoll.plan.learned import corrected, key_of

            found = corrections.get(key_of(ledger, model.shape))
            ledger = corrected(ledger, found, model) if found is not None else ledger
        return ledger, findings_of(ledger, model.shape, checked.items, environment, unquantised=model.unquantised)

    if gpus is not None and gpus < settings.gpus:
        raise BadInput(f"the command needs {settings.gpus} GPUs (TP x PP x DP), --gpus says {gpus}")
    said = (note.replace(LEFT_OUT, "planned without", 1) for note in checked.notes)  # no rewritten command is shown here
    return Ready(checked, model, settings, replan, (*notes, *said, *left_out))


def _before(checked: Checked, model: ModelFacts, card: Card) -> Ledger | None:
    """The same command in the release the upgrade starts from."""
    if checked.came_from is None:
        return None
    from plimsoll.plan.ledger import plan_ledger
    from plimsoll.plan.settings import read_settings

    old = checked.came_from
    line = read_command_line(check(checked.launch, old).rewritten[2:], old.release, unseen=checked.unseen)
    line = with_config(line, checked.config, old)
    settings = read_settings(line, checked.launch.environment, old.release, model.shape, card.name, card.total_bytes)
    return plan_ledger(model, settings, card)


def _with_drafter(model: ModelFacts, settings: Settings) -> tuple[ModelFacts, tuple[str, ...]]:
    """The model with the one that drafts for it; where that cannot be had, a note says that it is left out."""
    drafting = settings.speculative or {}
    name, revision = drafting.get("model"), drafting.get("revision")
    if settings.drafts_with_own_head:
        return model, ("the weights of the model's own multi-token head are not in these figures; its cache is",)
    if not isinstance(name, str):
        return model, ()
    try:
        drafter, notes = _model(name, revision if isinstance(revision, str) else None)
    except PlimsollError as error:
        return model, (f"the draft model {name} takes weights and KV of its own that are not in these figures: {error}",)
    return model._replace(drafter=drafter), notes


def _check_era(shape: ModelShape, release: str) -> None:
    """Refuse what an old release kept in another way than plan describes: a confident wrong answer takes servers down."""
    from plimsoll.vllm.flags import is_before

    if shape.mla is not None and is_before(release, MLA_SINCE):
        raise BadInput(
            f"{release} keeps full heads for this model (latent attention came with {MLA_SINCE}); plan cannot say how many"
        )


def _model(
    name: str, revision: str | None, overrides: Mapping[str, object] | None = None
) -> tuple[ModelFacts, tuple[str, ...]]:
    from plimsoll.models.folders import read_model
    from plimsoll.models.hub import Hub

    files = read_model(name, hub=Hub.from_environment(), revision=revision)
    shape = ModelShape.from_config(_overridden(files.config, overrides or {}))
    tensors = None if files.tensors is None else tuple((t.name, t.dtype, t.shape) for t in files.tensors)
    plain = _is_plain(files, overrides or {})
    return ModelFacts(name, shape, tensors, files.total_bytes, plain), (*files.notes, *shape.notes)


def _is_plain(files: ModelFiles, overrides: Mapping[str, object]) -> bool:
    """Whether the weights are known not to be packed: by their names, or because the catalogue holds such models' originals.

    A folder or a repository may say so in a file of its own, and --hf-overrides may name one.
    """
    if overrides.keys() & {"quantization_config_file", "quantization_config_dict_json"}:
        return False
    if files.tensors is None:
        return files.source.startswith("bundled catalogue")
    return not any(tensor.name.endswith((".qweight", ".qzeros")) for tensor in files.tensors)


def _overridden(config: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """A configuration with --hf-overrides applied, nested ones into what is nested."""
    merged = dict(config)
    for key, value in overrides.items():
        inner = merged.get(key)
        merged[key] = _overridden(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def card_of(options: Split) -> Card:
    """The card that --gpu or --gpu-memory-gib names, else this machine's."""
    used = parse_gib(options.values["--used-gib"]) if "--used-gib" in options.values else 0
    given = parse_gib(options.values["--gpu-memory-gib"]) if "--gpu-memory-gib" in options.values else None
    if given == 0:
        raise BadInput("--gpu-memory-gib 0: a card has memory")
    if given is not None and given > MOST_MEMORY:
        said = options.values["--gpu-memory-gib"]
        raise BadInput(
            f"--gpu-memory-gib {said}: no card has {format_gib(given)}; a number alone is GiB, nvidia-smi's are MiB: 23034MiB"
        )
    card = _card_named(options, used, given)
    if used >= card.total_bytes:
        raise BadInput(
            f"--used-gib {options.values['--used-gib']}: {card.name} has {format_gib(card.total_bytes)} in all; a number alone "
            "is GiB, nvidia-smi's are MiB: 4096MiB"
        )
    return card


def _card_named(options: Split, used: int, given: int | None) -> Card:
    if "--gpu" in options.values:
        from plimsoll.hardware.cards import gpu_named

        gpu = gpu_named(options.values["--gpu"])
        total = Estimate(gpu.total_bytes, gpu.total_low_bytes, gpu.total_high_bytes)
        if given is not None:
            total = Estimate.exact(given)
        return Card(gpu.name, total.value, total.low, total.high, gpu.compute_capability, used)
    if given is None:
        return _card_here(used)
    return Card(f"a card of {given / GIB:.6g} GiB", given, given, given, None, used)


def _card_here(used: int) -> Card:
    """The first card of this machine, by its name in our table; what others hold on it counts unless --used-gib says."""
    from plimsoll.hardware.cards import gpu_named
    from plimsoll.hardware.nvml import cards_here

    cards = cards_here()
    if not cards:
        raise BadInput("this machine has no NVIDIA card; name one with --gpu")
    gpu = gpu_named(cards[0].name)
    return Card(
        gpu.name,
        gpu.total_bytes,
        gpu.total_low_bytes,
        gpu.total_high_bytes,
        gpu.compute_capability,
        used or cards[0].used_bytes,
    )


def installed_vllm() -> str | None:
    """The version of the vLLM beside plimsoll, if there is one."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


# `plimsoll plan --certify`: whether any request that a command admits can exceed the card, and what closes each kind.

SCHEMA, TABLE_SCHEMA = "plimsoll.certify/1", "plimsoll.certificate/1"
_NOT_BESIDE = ("--workload", "--matrix", "--html")


def run_certify(options: Split, ready: Ready) -> int:
    """Certify the command, print the answer and write the door's table where one was asked for."""
    if "--certify" not in options.switches:
        raise BadInput("--table writes a certificate's table: it stands beside --certify")
    beside = [name for name in _NOT_BESIDE if name in options.values]
    if beside:
        raise BadInput(f"--certify answers one question; {beside[0]} beside it asks another")
    certificate = certificate_of(ready)
    if "--table" in options.values:
        _write_table(options.values["--table"], certificate, ready)
    show(as_json(certificate, ready) if "--json" in options.switches else as_text(certificate, ready))
    return 0 if certificate.certified else 1


def certificate_of(ready: Ready) -> Certificate:
    """The certificate of a command that was read."""
    ledger, findings = ready.replan(ready.settings)
    limits = limits_of(ready.checked)
    other = _other_card(ledger.card.name)
    limits = limits._replace(not_modelled=(*other, *limits.not_modelled))
    certificate = certify(Question(ready.model, ready.settings, limits, lambda changed: ready.replan(changed)[0]))
    return certificate._replace(starts=not any(stops_the_start(finding) for finding in findings))


def limits_of(checked: Checked) -> RequestLimits:
    """What the command's flags and variables say of the requests it takes."""
    release = checked.engine.release
    line = with_config(read_command_line(checked.rewritten[2:], release, unseen=checked.unseen), checked.config, checked.engine)
    return read_limits(Flags(line, release), dict(checked.launch.environment))


def _other_card(name: str) -> tuple[str, ...]:
    """Cards for which nothing was counted: other makers' kernels, and memory that the host hands out as well."""
    try:
        gpu = gpu_named(name)
    except BadInput:
        return ()  # known by its size alone
    if gpu.vendor is not Vendor.NVIDIA:
        return (f"the step on {name}, which runs other kernels",)
    return (f"what the host takes of {name}'s memory",) if gpu.unified_memory else ()


def _write_table(path: str, certificate: Certificate, ready: Ready) -> None:
    text = json.dumps(table_of(certificate, ready.model.name, datetime.now(UTC).isoformat(timespec="seconds")), indent=1)
    try:
        write_file(path, text + "\n")
    except WorldFailed as error:
        raise BadInput(f"--table {error}") from None


def table_of(certificate: Certificate, model: str, made: str) -> dict[str, Any]:
    """The table that the door reads. A kind that no request can exceed costs nothing: its worst is held back already."""
    settings = certificate.ledger.settings
    return {
        "schema": TABLE_SCHEMA,
        "vllm": settings.release,
        "model": model,
        "gpu": certificate.ledger.card.name,
        "made": made,
        "certified": certificate.certified,
        "spare_bytes": certificate.spare,
        "assumes": _assumes(certificate),
        "kinds": [
            _kind_row(kind) | ({} if kind.is_open else {"fixed_bytes": 0, "bytes_per_unit": 0}) for kind in certificate.kinds
        ],
    }


def _assumes(certificate: Certificate) -> dict[str, int | float]:
    """What must be so; the door holds the names of vLLM's settings against the engine's own."""
    settings = certificate.ledger.settings
    assumes: dict[str, int | float] = {
        "free_bytes_at_start": certificate.free_at_start,
        "neighbours_bytes": certificate.ledger.card.used_bytes,
        "pieces_bytes": certificate.pieces,
        "alive_bytes": certificate.alive,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_logprobs": certificate.step.limits.max_logprobs,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "v2_model_runner": settings.v2_runner,
    }
    if settings.max_model_len != AUTO_FIT:
        assumes["max_model_len"] = settings.max_model_len
    if not settings.has_fixed_cache:
        assumes["gpu_memory_utilization"] = settings.utilization
    if settings.max_loras:
        assumes |= {"max_loras": settings.max_loras, "max_lora_rank": settings.max_lora_rank}
    return assumes


def _kind_row(kind: Kind) -> dict[str, Any]:
    phase = kind.phase
    return {
        "kind": phase.kind,
        "unit": phase.unit,
        "fixed_bytes": phase.fixed_bytes,
        "bytes_per_unit": phase.bytes_per_unit,
        "most_units": phase.most_units,
        "scope": phase.scope,
        "smallest": kind.smallest,
        "closes": kind.closes,
        "source": phase.source,
    }


def as_json(certificate: Certificate, ready: Ready) -> str:
    """The answer as one object."""
    card = certificate.ledger.card
    body = {
        "schema": SCHEMA,
        "certified": certificate.certified,
        "fits": certificate.ledger.fits,
        "vllm": certificate.ledger.settings.release,
        "model": ready.model.name,
        "gpu": {"name": card.name, "total_bytes": card.total_bytes},
        "room_bytes": certificate.room,
        "spare_bytes": certificate.spare,
        "terms": [{"name": term.name, "bytes": term.size, "source": term.source} for term in certificate.terms]
        + [{"name": found.name, "bytes": -found.size, "source": found.source} for found in certificate.residents],
        "kinds": [
            _kind_row(kind)
            | {
                "worst_bytes": kind.phase.bytes_of(kind.phase.most_units),
                "spare_bytes": kind.spare,
                "covered_by_profile": kind.phase.covered,
                "why": kind.phase.why,
                "request": smallest_request(kind) if kind.is_open else None,
            }
            for kind in certificate.kinds
        ],
        "unknown": [unknown.reason for unknown in certificate.unknown],
        "closes_all": certificate.closes_all or None,
        "assumes": _assumes(certificate),
        "assumptions": assumptions_of(certificate),
        "notes": list(ready.notes),
    }
    return json.dumps(body, indent=2)


def as_text(certificate: Certificate, ready: Ready) -> str:
    """The answer in words: the verdict, the kinds that are open, the account, what is assumed."""
    lines = [_verdict(certificate)]
    release, card = certificate.ledger.settings.release, certificate.ledger.card.name
    lines.append(f"{ready.model.name} on {card}, vLLM {release}")
    for kind in certificate.open_kinds:
        closes = kind.closes or "no flag that plan knows"
        lines += [f"  {smallest_request(kind)}", f"    closed by: {closes}   ({kind.phase.source})"]
    lines += [f"  not known: {unknown.reason}" for unknown in certificate.unknown]
    if certificate.closes_all:
        lines.append(f"  all of them closed by: {certificate.closes_all}")
    lines += ["", "What is left for a step, at the bad end of every band:"]
    lines += [_row(term.name, term.size, term.source) for term in certificate.terms]
    lines += [_row(found.name, -found.size, found.source) for found in certificate.residents]
    lines += [_row("spare", certificate.spare, "for each phase of a step"), "", "The most that a step's phases take:"]
    lines += [_phase_row(kind) for kind in certificate.kinds]
    lines += ["", "Assumed:", *(f"  {sentence}" for sentence in assumptions_of(certificate))]
    lines += [f"  note: {note}" for note in ready.notes]
    return "\n".join(lines)


def _verdict(certificate: Certificate) -> str:
    if certificate.certified:
        return "Certified: no admitted request can exceed the card"
    if not certificate.starts or not certificate.ledger.fits:
        return "Not certified: vLLM would not start with it (plan says why)"
    if certificate.open_kinds:
        count = len(certificate.open_kinds)
        return f"Not certified: {format_count(count)} kind{'s' if count > 1 else ''} of request can exceed the card"
    return f"Not certified: {certificate.unknown[0].reason} is not known"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _row(name: str, size: int, source: str) -> str:
    return f"  {name:<44} {_gib(size):>11}   {source}"


def _phase_row(kind: Kind) -> str:
    phase = kind.phase
    most = f"{phase.kind}, {format_count(phase.most_units)} {phase.unit}"
    size = "in profile" if phase.covered else _gib(phase.bytes_of(phase.most_units))
    return f"  {most:<44} {size:>11}   {phase.source}: {phase.why}"


# `plimsoll plan --compare FILE`: one command a line, planned side by side; a line may name a card of its own.

OF_A_LINE = ("--gpu", "--gpus", "--gpu-memory-gib", "--used-gib", "--vllm")
"""What may stand in front of a line's `vllm serve`."""
_NAMES_A_CARD = frozenset({"--gpu", "--gpu-memory-gib"})
_OF_A_CARD = _NAMES_A_CARD | {"--used-gib"}


def compare(options: Split) -> int:
    """Plan every start in the file; one that cannot be planned says why in its place."""
    from plimsoll.launch.files import read_list
    from plimsoll.render import plan

    path = options.values["--compare"]
    beside = (*options.rest, *(options.verbatim or ()))
    if beside:
        raise BadInput(f"--compare {path} names the file that holds the commands; {beside[0]!r} stands beside it")
    launches, notes = read_list(path)
    if not all(_NAMES_A_CARD & _names(launch) for launch in launches):
        card_of(options)  # a card that is missing or unknown is said once, not for each line
    found = []
    for launch in launches:
        try:
            planned = planned_launch(_of_line(options, launch), launch, "", learned=True)
            found.append(plan.Compared(launch.source, planned))
        except PlimsollError as error:
            found.append(plan.Compared(launch.source, None, str(error)))
    as_shown = plan.compare_as_json if "--json" in options.switches else plan.compare_as_text
    show(as_shown(found, notes))
    return 0 if all(one.planned is not None and one.planned.fits for one in found) else 1


def _names(launch: Launch) -> set[str]:
    return {word.partition("=")[0] for word in launch.in_front}


def _of_line(options: Split, launch: Launch) -> Split:
    """The options for one line: its own go before those that were typed; a card of its own has neighbours of its own."""
    own = split_options(launch.in_front, with_value=OF_A_LINE, switches=())
    if own.rest or own.verbatim is not None:
        raise BadInput(f"`{' '.join(launch.in_front)}`: in front of a command only {', '.join(OF_A_LINE)} can stand")
    other_card = bool(own.values.keys() & _NAMES_A_CARD)
    typed = {name: value for name, value in options.values.items() if not (other_card and name in _OF_A_CARD)}
    return options._replace(values={**typed, **own.values})
