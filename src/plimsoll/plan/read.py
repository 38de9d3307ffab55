"""Reads a command into a plan: the model, the card, the settings, then the ledger. Of plan's modules this one reads files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.findings import Finding, Severity
from plimsoll.hardware.cards import gpu_named
from plimsoll.launch.arguments import config_of, launches_named
from plimsoll.launch.check_flags import Checked, check, with_config
from plimsoll.launch.command_line import read_command_line
from plimsoll.launch.options import Split
from plimsoll.launch.rewrite import LEFT_OUT
from plimsoll.models.shape import ModelShape
from plimsoll.plan.advise import Advice
from plimsoll.plan.ledger import Card, Ledger, ModelFacts
from plimsoll.units import GIB, Estimate, format_gib, parse_gib
from plimsoll.vllm.versions import Behaviour, Engine, engine_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plimsoll.findings import Finding
    from plimsoll.launch.launches import Launch
    from plimsoll.models.folders import ModelFiles
    from plimsoll.plan.ledger import Ledger
    from plimsoll.plan.settings import Settings


class Planned(NamedTuple):
    """A plan and all that was said about it."""

    model: str
    ledger: Ledger
    findings: Sequence[Finding]
    advice: Sequence[Advice]
    checked: Checked
    shape: ModelShape  # what the workload and the matrix are judged by
    notes: Sequence[str] = ()
    before: Ledger | None = None  # the same command in the release an upgrade starts from

    @property
    def fits(self) -> bool:
        """Whether it will start and serve, as far as we can tell."""
        return self.ledger.fits and not any(finding.severity is Severity.CRITICAL for finding in self.findings)


MOST_MEMORY = 1024 * GIB  # beyond what any card has: a figure in MiB, most likely


def planned_of(options: Split) -> Planned:
    """The plan of the command after `--`, for `doctor`: nothing is printed."""
    return planned_launch(options, *launches_named(options, "plan")[0], learned=False)


def planned_launch(options: Split, launch: Launch, folder: str, *, learned: bool = True) -> Planned:
    """The plan of a start that was found already."""
    return planned_from(read_launch(options, launch, folder, learned=learned))


def read_launch(options: Split, launch: Launch, folder: str, *, learned: bool = True) -> Ready:
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


class Ready(NamedTuple):
    """A command that was read, with all that is needed to plan it, and to plan it again with other settings."""

    checked: Checked
    model: ModelFacts
    settings: Settings
    replan: Callable[[Settings], tuple[Ledger, list[Finding]]]
    notes: tuple[str, ...]


def ready_of(options: Split, *, learned: bool = True) -> Ready:
    """The command after `--`, for `tune` and `sweep`, which plan it many times."""
    return read_launch(options, *launches_named(options, "tune")[0], learned=learned)


def planned_from(ready: Ready) -> Planned:
    """Its plan, with findings and advice."""
    from plimsoll.plan.advise import advise

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
    if shape.mla is not None and not Behaviour.LATENT_CACHE.is_in(release):
        since = Behaviour.LATENT_CACHE.since
        why = f"{release} keeps full heads for this model (latent attention came with {since})"
        raise BadInput(f"{why}; plan cannot say how many")


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
    from plimsoll.hardware.nvml import read_cards

    cards = read_cards()
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
