"""Reads a command into a plan: the model, the card, the settings, then the ledger. In plan only this and `store` read files.

launch ──> check ──> Settings ─┐
config.json, headers ──> shape ─┼──> PlanInput ──> plan() ──> MemoryPlan: ledger, findings, advice
--gpu, NVML ──> Card ───────────┘        └──> replan(other settings), for tune, the matrix and the advice
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.errors import BadInput, PlimsollError
from plimsoll.findings import Finding
from plimsoll.hardware.cards import Vendor, gpu_named, read_cards
from plimsoll.launch.check_flags import LEFT_OUT, FlagReport, check
from plimsoll.launch.command_line import Launch, config_of, engine_meant, launches_named
from plimsoll.models.files import overlaid, read_model
from plimsoll.models.shape import ModelShape
from plimsoll.plan.certify import Certificate, certificate_of
from plimsoll.plan.findings import Advice, advise, band_notes, findings_of, stops_the_start
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.options import CardOptions, ServerOptions
from plimsoll.plan.settings import Card, Flags, Settings, read_settings
from plimsoll.units import GIB, Estimate, format_gib
from plimsoll.vllm.versions import Behaviour, engine_named

if TYPE_CHECKING:
    from plimsoll.models.hub import Hub
    from plimsoll.plan.learned import Correction


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A plan: ledger, findings, advice and notes."""

    model: str
    ledger: Ledger
    findings: Sequence[Finding]
    advice: Sequence[Advice]
    checked: FlagReport
    shape: ModelShape  # the workload and the matrix are judged by it
    notes: Sequence[str] = ()
    before: Ledger | None = None  # the same command in the release an upgrade starts from

    @property
    def fits(self) -> bool:
        """True if the command will start and serve, by the central figures."""
        return self.ledger.fits and not any(map(stops_the_start, self.findings))

    @property
    def is_undecided(self) -> bool:
        """True if the command does not fit by the central figures, but does by others within the bands."""
        return not self.ledger.fits and self.ledger.fits_at_high_end and not any(map(stops_the_start, self.findings))


@dataclass(frozen=True, slots=True)
class PlanInput:
    """A command that was read, with all that is needed to plan it, and to plan it again with other settings."""

    checked: FlagReport
    flags: Flags
    model: ModelFacts
    settings: Settings
    replan: Callable[[Settings], tuple[Ledger, list[Finding]]]
    notes: tuple[str, ...]

    def plan(self) -> MemoryPlan:
        """The command's plan, with findings and advice."""
        ledger, findings = self.replan(self.settings)
        advice = advise(ledger, self.model.shape, findings, self.replan)
        before = None
        if (old := self.checked.came_from) is not None:
            flags = Flags(check(self.checked.launch, old, config=self.checked.config).line, old.release)
            settings = read_settings(flags, dict(self.checked.launch.environment), self.model.shape, ledger.card)
            before = plan_ledger(self.model, settings, ledger.card)
        notes = (*self.notes, *band_notes(ledger, self.model.shape))
        return MemoryPlan(self.model.name, ledger, findings, advice, self.checked, self.model.shape, notes, before)

    def certify(self) -> Certificate:
        """Returns the certificate that no request the command admits can exceed the card, or what prevents it."""
        environment = dict(self.checked.launch.environment)
        return certificate_of(self.model, self.settings, self.flags, environment, self.replan)


def plan_command(options: ServerOptions) -> MemoryPlan:
    """The plan of the command after `--`, without corrections from real starts."""
    return read_command(options, "plan", learned=False).plan()


def plan_launch(options: ServerOptions, launch: Launch, folder: str, *, learned: bool = True) -> MemoryPlan:
    return read_launch(options, launch, folder, learned=learned).plan()


def read_command(options: ServerOptions, command: str = "tune", *, learned: bool = True) -> PlanInput:
    """The command after `--`, for callers that plan it many times; error lines name the plimsoll command `command`."""
    return read_launch(options, *launches_named(options, command)[0], learned=learned)


def read_launch(options: ServerOptions, launch: Launch, folder: str, *, learned: bool = True) -> PlanInput:
    """The plan's input for a launch, on the card that the options name; `learned`: with corrections from real starts."""
    engine = engine_meant(launch, options.vllm, None if options.vllm else installed_vllm())
    came_from = engine_named(options.came_from, "--from") if options.came_from is not None else None
    checked = check(launch, engine, came_from, config_of(launch, folder))
    card = card_of(options)
    if checked.model is None:
        raise BadInput("the command names no model")
    flags = Flags(checked.line, engine.release)
    model, notes = _read_model(checked.model, flags.text("--revision"), flags.mapping("--hf-overrides"))
    if model.shape.mla is not None and not Behaviour.LATENT_CACHE.is_in(engine.release):  # a wrong answer takes servers down
        why = f"latent attention came with {Behaviour.LATENT_CACHE.since}"
        raise BadInput(f"{engine.release} keeps full heads for this model ({why}); plan cannot say how many")
    environment = dict(launch.environment)
    own_build = _is_own_build(engine.asked) or re.search(r"cu1[0-2]", launch.image or "") is not None
    settings = replace(read_settings(flags, environment, model.shape, card), own_build=own_build)
    if launch.image or launch.vllm:
        notes += (f"planned for vLLM {engine.release}: {engine.because}",) if engine.because else ()
    notes += tuple(note.replace(LEFT_OUT, "planned without", 1) for note in checked.notes)  # no rewritten command is shown here
    drafting = settings.speculative or {}
    drafter, revision = drafting.get("model"), drafting.get("revision")
    if settings.drafts_with_own_head:
        notes += ("the weights of the model's own multi-token head are not in these figures; its cache is",)
    elif isinstance(drafter, str):
        try:
            facts, more = _read_model(drafter, revision if isinstance(revision, str) else None, {})
            model, notes = replace(model, drafter=facts), (*notes, *more)
        except PlimsollError as error:
            notes += (f"the draft model {drafter} takes weights and KV of its own that are not in these figures: {error}",)
    # Corrections for the model alone do not apply with a drafter beside it.
    corrections = read_corrections() if learned and model.drafter is None else {}

    def replan(changed: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(model, changed, card)
        if corrections:
            from plimsoll.plan.learned import corrected, key_of

            correction = corrections.get(key_of(ledger, model.shape))
            ledger = corrected(ledger, correction, model) if correction is not None else ledger
        return ledger, findings_of(ledger, model.shape, checked.items, environment, unquantised=model.unquantised)

    if options.gpus and options.gpus < settings.gpus:
        raise BadInput(f"the command needs {settings.gpus} GPUs (TP x PP x DP), --gpus says {options.gpus}")
    return PlanInput(checked, flags, model, settings, replan, notes)


def _is_own_build(asked: str) -> bool:
    """True for 0.21.0+cu129 and 0.21.0+acme.3, whose kernels may differ; not for a nightly's hash or a build for CUDA 13."""
    local = (re.fullmatch(r"v?\d[^+-]*[+-](.+)", asked.strip()) or ("", ""))[1].lower()
    if cuda := re.search(r"cu(\d\d)", local):
        return int(cuda[1]) < 13
    return bool(local) and re.match(r"g[0-9a-f]{4,}", local) is None


def _read_model(name: str, revision: str | None, overrides: Mapping[str, object]) -> tuple[ModelFacts, tuple[str, ...]]:
    def hub() -> Hub:
        from plimsoll.models.hub import Hub  # only where the model is nowhere on this machine

        return Hub.from_environment()

    files = read_model(name, hub=hub, revision=revision)
    shape = ModelShape.from_config(overlaid(files.config, overrides))
    # True if the weights are known not to be packed: by their names, or because the catalogue holds such models' originals.
    # A folder or a repository may say so in a file of its own, and --hf-overrides may name one.
    if files.tensors is None:
        unquantised = files.source.startswith("bundled catalogue")
    else:
        unquantised = not any(tensor.name.endswith((".qweight", ".qzeros")) for tensor in files.tensors)
    if overrides.keys() & {"quantization_config_file", "quantization_config_dict_json"}:
        unquantised = False
    return ModelFacts(name, shape, files.tensors, files.total_bytes, unquantised), (*files.notes, *shape.notes)


def card_of(options: CardOptions) -> Card:
    """The card that --gpu or --gpu-memory-gib names, else this machine's."""
    used = options.used_gib if isinstance(options, ServerOptions) else 0
    memory, name = options.gpu_memory_gib, options.gpu
    if name is None and memory is not None:
        card = Card(f"a card of {memory / GIB:.6g} GiB", memory, memory, memory, None, used, is_named=False)
    else:
        if name is None:
            cards = read_cards()
            if not cards:
                raise BadInput("this machine has no NVIDIA card; name one with --gpu")
            name, used = cards[0].name, used or cards[0].used_bytes
        gpu = gpu_named(name, memory)
        total = Estimate(gpu.total_bytes, gpu.total_low_bytes, gpu.total_high_bytes)
        if memory is not None:
            total = Estimate.exact(memory)
        shared = gpu.unified_memory and gpu.memory_kind.startswith("LPDDR")  # not beside HBM of its own, as on GH200
        amd = gpu.vendor is Vendor.AMD
        card = Card(gpu.name, total.value, total.low, total.high, gpu.compute_capability, used, shared, amd)
    if used >= card.total_bytes:
        raise BadInput(
            f"--used-gib {used / GIB:g}: {card.name} has {format_gib(card.total_bytes)} in all; a number alone "
            "is GiB, nvidia-smi's are MiB: 4096MiB"
        )
    return card


def installed_vllm() -> str | None:
    """The version of the vLLM beside plimsoll, if there is one."""
    from importlib.metadata import PackageNotFoundError, version  # 20 ms, and most commands name a release

    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def corrections_file() -> Path:
    """Returns the path of this user's corrections; a relative XDG_STATE_HOME is ignored, as XDG requires."""
    base = os.environ.get("XDG_STATE_HOME", "")
    home = os.path.expanduser("~")  # noqa: PTH111  (Path.home may raise)
    return Path(base if base.startswith("/") else f"{home}/.local/state") / "plimsoll" / "corrections.json"


def read_corrections(path: Path | None = None) -> dict[str, Correction]:
    """All corrections by their keys, none where there is no file; BadInput in one line for a file that is broken or newer."""
    path = path or corrections_file()
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from None
    from plimsoll.models.safetensors import read_plain  # only where something was learned
    from plimsoll.plan.learned import FILE_MAX_BYTES, decoded

    return decoded(read_plain(path, FILE_MAX_BYTES), str(path))
