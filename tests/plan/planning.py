"""Plans for tests: a model, a card and the words that follow `vllm serve MODEL`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from plimsoll.findings import Code, Finding, Severity
from plimsoll.launch.command_line import read_command_line
from plimsoll.models.files import bundled_model
from plimsoll.models.shape import ModelShape
from plimsoll.plan.findings import Advice, advise, findings_of
from plimsoll.plan.ledger import Ledger, ModelFacts, plan_ledger
from plimsoll.plan.settings import Card, Flags, Settings, read_settings
from plimsoll.units import GIB
from tests.models.model_configs import LLAMA_8B


def card(name: str, gib: float, low: float, high: float, capability: tuple[int, int], used: float = 0) -> Card:
    return Card(name, int(gib * GIB), int(low * GIB), int(high * GIB), capability, int(used * GIB))


H100 = card("H100 SXM 80GB", 79.19, 79.15, 79.25, (9, 0))
H200 = card("H200 SXM 141GB", 139.80, 139.7, 139.85, (9, 0))
L4 = card("L4", 22.03, 22.0, 22.1, (8, 9))


def bundled(name: str, **changes: Any) -> dict[str, Any]:
    """The config of a model in the catalogue, with changes."""
    model = bundled_model(name)
    assert model is not None, name
    return {**model.config, **changes}


def facts_of(config: Mapping[str, Any], **changes: Any) -> ModelFacts:
    return ModelFacts("m", ModelShape.from_config({**config, **changes}))


LLAMA = facts_of(LLAMA_8B)


def settings_of(
    command: str = "", release: str = "0.32.0", model: ModelFacts = LLAMA, on: Card = H100, environment: Mapping[str, str] = {}
) -> Settings:
    line = read_command_line(["m", *shlex.split(command)], release)
    return read_settings(Flags(line, release), environment, model.shape, on)


def ledger_of(command: str = "", release: str = "0.32.0", model: ModelFacts = LLAMA, on: Card = H100) -> Ledger:
    return plan_ledger(model, settings_of(command, release, model, on), on)


class Planned(NamedTuple):
    """A ledger with what was found and what is offered."""

    ledger: Ledger
    findings: list[Finding]
    advice: list[Advice]

    @property
    def codes(self) -> dict[Code, Severity]:
        return {finding.code: finding.severity for finding in self.findings}

    @property
    def stops(self) -> set[Code]:
        """The codes that stop the start."""
        return {finding.code for finding in self.findings if finding.severity is Severity.CRITICAL}


def planned(
    command: str = "", release: str = "0.32.0", model: ModelFacts = LLAMA, on: Card = H100,
    environment: Mapping[str, str] = {}, *, unquantised: bool = False,
) -> Planned:  # fmt: skip
    """The command planned as `plimsoll plan` does, without its files."""

    def replan(changed: Settings) -> tuple[Ledger, list[Finding]]:
        ledger = plan_ledger(model, changed, on)
        return ledger, findings_of(ledger, model.shape, (), environment, unquantised=unquantised)

    ledger, findings = replan(settings_of(command, release, model, on, environment))
    return Planned(ledger, findings, advise(ledger, model.shape, findings, replan))
