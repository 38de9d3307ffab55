"""Plans the very server a log is of, so that cures come with values computed for it."""

from __future__ import annotations

from plimsoll.cli.options import Split
from plimsoll.doctor.arguments import command_words
from plimsoll.doctor.case import PlanSays
from plimsoll.doctor.facts import LogFacts
from plimsoll.errors import PlimsollError


class Planner:
    """Called with a log's facts; None wherever the log says too little, or the model is not at hand. Never asks the network."""

    def __init__(self, options: Split) -> None:
        self._options = options
        self.said: dict[str, object] | None = None

    def __call__(self, facts: LogFacts) -> PlanSays | None:
        """The plan of this server's own command."""
        words = command_words(facts.flags)
        total = facts.measured.total_bytes
        given = {name: self._options.values[name] for name in ("--gpu", "--gpu-memory-gib") if name in self._options.values}
        if total is None and not given:
            return None
        card = given or {"--gpu-memory-gib": f"{(total or 0) / (1 << 30):.3f}"}
        try:
            if words is not None and not _is_elsewhere(words[2]):
                return self._plan(words, facts, card)
        except PlimsollError:
            pass  # a model nobody described, a flag that makes no sense: the log's own figures must do
        if not given:
            return None
        from plimsoll.cli.plan import card_of

        return PlanSays(total_bytes=card_of(Split(card, frozenset(), (), None)).total_bytes)

    def _plan(self, words: list[str], facts: LogFacts, card: dict[str, str]) -> PlanSays:
        import os

        from plimsoll.cli.plan import planned_of

        os.environ["HF_HUB_OFFLINE"] = "1"  # a diagnosis must not wait for a hub, nor tell it anything
        values = {**card, **({"--vllm": facts.version} if facts.version else {})}
        planned = planned_of(Split(values, frozenset(), (), tuple(words)))
        ledger = planned.ledger
        says = PlanSays(
            ledger.weights.value, ledger.kv.value, ledger.slack.value, ledger.card.total_bytes, ledger.requested.value,
            planned.shape.vocab_size, tuple(planned.advice),
        )  # fmt: skip
        self.said = {name: value for name, value in says._asdict().items() if name != "advice"}
        return says


def _is_elsewhere(model: str) -> bool:
    """A folder of the machine the log is from, which this one does not have: known before anything of `plan` is loaded."""
    import os

    return model.startswith(("/", "./", "../", "~")) and not os.access(model, os.R_OK)
