"""usage: plimsoll plan --gpu NAME [options] vllm serve MODEL [any vllm flag...]

Says before launch whether a vLLM server fits its GPU, how many KV blocks remain, and what limits it. Needs no GPU, no vLLM
and, for a local folder or a bundled model, no network.

  --gpu NAME            the card: H100, L40S, A100-80G, ... (docs/gpus.md lists them); default: this machine's, through NVML
  --gpu-memory-gib X    a card that is not known, by the memory vLLM sees; with --gpu it replaces the card's total
  --used-gib X          memory that other processes hold on the card
  --vllm VERSION        default: the vLLM installed beside plimsoll, else the newest known
  --from VERSION        also what the upgrade from this version does to the flags and the KV cache
  --pid N               plan the server that runs as process N
  --json                one JSON object, schema plimsoll.plan/1

MODEL is a folder with config.json, a model in Hugging Face's own cache or in the bundled catalogue (docs/models.md), or any
other id, whose config.json and safetensors headers are then read from the Hugging Face hub. HF_HUB_OFFLINE=1 forbids that.
Instead of a command, a script, compose file or manifest works as well: plimsoll plan --gpu L4 start.sh

Exit codes: 0 it fits, 1 it does not, 2 your input is wrong, 3 the hub did not answer.
Read on: docs/plan.md
"""

from __future__ import annotations

from plimsoll.cli.launch_words import config_of, launches_named
from plimsoll.cli.options import Split, split_options
from plimsoll.cli.output import show
from plimsoll.domain.estimate import Estimate
from plimsoll.domain.model import ModelShape
from plimsoll.domain.units import parse_gib
from plimsoll.engine.check import Checked, check
from plimsoll.engine.command_line import read_command_line
from plimsoll.engine.versions import Engine, engine_named
from plimsoll.errors import BadInput
from plimsoll.plan.ledger import Card, ModelFacts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from plimsoll.plan.ledger import Ledger
    from plimsoll.report.plan import Planned


def run(words: list[str]) -> int:
    """Read, think, render, exit code."""
    options = split_options(
        words,
        with_value=("--gpu", "--gpu-memory-gib", "--used-gib", "--vllm", "--from", "--pid"),
        switches=("--json", "--help", "-h"),
    )
    if options.switches & {"--help", "-h"}:
        show(__doc__.rstrip() if __doc__ else "")
        return 0
    engine = engine_named(options.values.get("--vllm") or _installed_vllm())
    came_from = engine_named(options.values["--from"], "--from") if "--from" in options.values else None
    launch, folder = launches_named(options, "plan")[0]
    checked = check(launch, engine, came_from, config_of(launch, folder))
    card = _card(options)
    from plimsoll.report import plan as report

    planned = _planned(checked, engine, card)
    show(report.as_json(planned) if "--json" in options.switches else report.as_text(planned))
    return 0 if planned.fits else 1


def _planned(checked: Checked, engine: Engine, card: Card) -> Planned:
    from plimsoll.domain.finding import Finding
    from plimsoll.plan.advise import advise
    from plimsoll.plan.findings import findings_of
    from plimsoll.plan.ledger import plan_ledger
    from plimsoll.plan.settings import Settings, read_settings
    from plimsoll.report.plan import Planned

    if checked.model is None:
        raise BadInput("the command names no model")
    model, notes = _model(checked.model)
    environment = dict(checked.launch.environment)
    line = read_command_line(checked.rewritten[2:], engine.release, unseen=checked.unseen)
    settings = read_settings(line, checked.launch.environment, engine.release, model.shape, card.name, card.total_bytes)

    def replan(changed: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(model, changed, card)
        return ledger, findings_of(ledger, model.shape, checked.items, environment)

    ledger, findings = replan(settings)
    advice = advise(ledger, model.shape, findings, replan)
    before = _before(checked, model, card)
    return Planned(checked.model, ledger, findings, advice, checked, (*notes, *checked.notes, *settings.notes), before)


def _before(checked: Checked, model: ModelFacts, card: Card) -> Ledger | None:
    """The same command in the release the upgrade starts from."""
    if checked.came_from is None:
        return None
    from plimsoll.engine.check import check
    from plimsoll.plan.ledger import plan_ledger
    from plimsoll.plan.settings import read_settings

    old = checked.came_from
    line = read_command_line(check(checked.launch, old).rewritten[2:], old.release, unseen=checked.unseen)
    settings = read_settings(line, checked.launch.environment, old.release, model.shape, card.name, card.total_bytes)
    return plan_ledger(model, settings, card)


def _model(name: str) -> tuple[ModelFacts, tuple[str, ...]]:
    from plimsoll.sources.hub import Hub
    from plimsoll.sources.models import read_model

    files = read_model(name, hub=Hub.from_environment())
    shape = ModelShape.from_config(files.config)
    tensors = None if files.tensors is None else tuple((t.name, t.dtype, t.shape) for t in files.tensors)
    return ModelFacts(name, shape, tensors, files.total_bytes), (*files.notes, *shape.notes)


def _card(options: Split) -> Card:
    used = parse_gib(options.values["--used-gib"]) if "--used-gib" in options.values else 0
    given = parse_gib(options.values["--gpu-memory-gib"]) if "--gpu-memory-gib" in options.values else None
    if "--gpu" in options.values:
        from plimsoll.domain.gpu import gpu_named

        gpu = gpu_named(options.values["--gpu"])
        total = Estimate(gpu.total_bytes, gpu.total_low_bytes, gpu.total_high_bytes)
        if given is not None:
            total = Estimate.exact(given)
        return Card(gpu.name, total.value, total.low, total.high, gpu.compute_capability, used)
    if given is None:
        return _card_here(used)
    return Card(f"a card of {options.values['--gpu-memory-gib']}", given, given, given, None, used)


def _card_here(used: int) -> Card:
    """The first card of this machine, by its name in our table; what others hold on it counts unless --used-gib says."""
    from plimsoll.domain.gpu import gpu_named
    from plimsoll.sources.nvml import cards_here

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


def _installed_vllm() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm")
    except PackageNotFoundError:
        return None
