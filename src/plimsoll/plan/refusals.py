"""What vLLM refuses whatever the memory: settings that contradict the model, the card or each other. Only what is certain."""

from __future__ import annotations

from collections.abc import Mapping

from plimsoll.domain.finding import Code, Evidence, Finding, Severity
from plimsoll.domain.model import ModelShape
from plimsoll.plan.ledger import Ledger

TOO_LONG_FOR_THE_MODEL = "the model has no such context"
NOT_QUANTISED = "the checkpoint is not quantised"
TOO_FEW_LORAS_IN_HOST = "fewer LoRAs in host memory than on the GPU"
BFLOAT16_SINCE = (8, 0)  # compute capability; asked by the workers of every release
# Methods that read how a checkpoint was made from its own files and do not quantise while they load (as fp8 does).
_MADE_BEFORE = frozenset({"awq", "awq_marlin", "gptq", "gptq_marlin"})
# Model types that vLLM refuses to serve in 16 bits of the older kind (`_FLOAT16_NOT_SUPPORTED_MODELS` of 0.32.0).
_NOT_IN_FLOAT16 = frozenset({"gemma2", "gemma3", "gemma3_text", "glm4"})


def refusals(ledger: Ledger, shape: ModelShape, environment: Mapping[str, str], *, unquantised: bool) -> list[Finding]:
    """Every such refusal; `unquantised` says that the checkpoint is known to hold plain weights."""
    found = (
        _too_long(ledger, shape, environment),
        _dtype(ledger),
        _quantization(ledger, shape, unquantised=unquantised),
        _loras(ledger),
    )
    return [finding for finding in found if finding is not None]


def may_be_float16(shape: ModelShape) -> bool:
    """Whether vLLM serves this model in float16."""
    return shape.model_type not in _NOT_IN_FLOAT16


def _too_long(ledger: Ledger, shape: ModelShape, environment: Mapping[str, str]) -> Finding | None:
    """A context beyond what the model was made for."""
    asked = ledger.settings.max_model_len
    if asked <= shape.max_context or environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1":
        return None
    because = (
        f"--max-model-len {asked} is beyond the model's own {shape.max_context}; VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 overrides"
    )
    return Finding(Code.OTHER_BAD_CONFIG, Severity.CRITICAL, 0.9, TOO_LONG_FOR_THE_MODEL, because)


def _dtype(ledger: Ledger) -> Finding | None:
    """bfloat16 by name on a card that has none; left to itself, vLLM takes float16 there."""
    has = ledger.card.compute_capability
    if ledger.settings.dtype != "bfloat16" or has is None or has >= BFLOAT16_SINCE:
        return None
    because = (
        f"--dtype bfloat16 needs compute capability 8.0, {ledger.card.name} has {has[0]}.{has[1]}: vLLM's workers stop at it"
    )
    evidence = (Evidence("command", "--dtype bfloat16"),)
    return Finding(Code.OTHER_UNSUPPORTED_GPU, Severity.CRITICAL, 0.95, "the card has no bfloat16", because, evidence)


def _quantization(ledger: Ledger, shape: ModelShape, *, unquantised: bool) -> Finding | None:
    """A method that only reads weights which were quantised before, and plain weights."""
    method = ledger.settings.quantization
    if method not in _MADE_BEFORE or shape.quantization is not None or not unquantised:
        return None
    because = (
        f"--quantization {method} reads weights that were quantised before, and the model has no quantization_config: vLLM "
        f'stops with "Cannot find the config file for {method}". Leave it out, or take a checkpoint that was made so'
    )
    evidence = (Evidence("command", f"--quantization {method}"),)
    return Finding(Code.OTHER_BAD_CONFIG, Severity.CRITICAL, 0.95, NOT_QUANTISED, because, evidence)


def _loras(ledger: Ledger) -> Finding | None:
    """Fewer slots for adapters in host memory than on the GPU; vLLM takes 0 as not given."""
    settings = ledger.settings
    if not settings.max_loras or not 0 < settings.max_cpu_loras < settings.max_loras:
        return None
    because = f"--max-cpu-loras {settings.max_cpu_loras} must be at least --max-loras {settings.max_loras}: vLLM refuses it"
    return Finding(Code.OTHER_BAD_CONFIG, Severity.CRITICAL, 0.95, TOO_FEW_LORAS_IN_HOST, because)
