"""What the files of every way to launch have in common: images, words, paths, and how long the gate is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.assets.settings import Command, PlanFacts, Settings
from plimsoll.assets.texts import flag_lines
from plimsoll.errors import BadInput
from plimsoll.hardware.cards import Vendor, gpu_named
from plimsoll.vllm import versions
from plimsoll.vllm.flags import holds_in

# The paths that clients may reach through a proxy. Everything else stays inside: figures, drains, adapters, admin
# endpoints.
#
# A list of what is let through, by whole paths: what is merely kept out can be spelled another way
# (`/v1/load%5flora_adapter`).

PATHS = (
    "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v2/embed",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime",
)  # fmt: skip
RESPONSES = "/v1/responses"  # Its answers are asked for and cancelled by id, below this path


def client_paths(release: str) -> tuple[str, ...]:
    """The paths of PATHS that the release has."""
    there = {
        name.partition(" ")[2]
        for name, stretches in versions.rows("endpoints").items()
        if any(holds_in(stretch, release) for stretch in stretches)
    }
    return tuple(path for path in PATHS if path in there)


GUARD_IMAGE = "YOUR-IMAGE-WITH-PLIMSOLL"  # Python 3.11 or newer with plimsoll in it


def vendor_of(gpu: str) -> Vendor:
    """Whose card it is; one that is not known is taken for NVIDIA's, as vLLM's stock build does."""
    try:
        return gpu_named(gpu).vendor
    except BadInput:
        return Vendor.NVIDIA


def is_amd(settings: Settings) -> bool:
    """Whether the plan is for a card of AMD's."""
    return settings.plan is not None and vendor_of(settings.plan.gpu) is Vendor.AMD


def server_image(settings: Settings) -> str:
    """vLLM's own image of the release."""
    return f"vllm/vllm-openai{'-rocm' if is_amd(settings) else ''}:v{settings.vllm}"


def container_words(command: Command) -> list[str]:
    """The command without --host: in a container the server must be reached from outside it."""
    kept: list[str] = []
    for group in flag_lines(command.words):
        name, joined, _ = group[0].partition("=")
        kept += group if name != "--host" else group[1:] if joined else group[2:]
    return kept


def container_environment(command: Command, wheel: str) -> list[tuple[str, str]]:
    """The command's variables, with the mounted wheel where Python looks first."""
    own = dict(command.environment)
    if command.has_gate:
        own["PYTHONPATH"] = ":".join([f"/plimsoll/{wheel}", *([own["PYTHONPATH"]] if own.get("PYTHONPATH") else [])])
    return list(own.items())


def model_folder(command: Command) -> str | None:
    """The model, where it is a folder of the machine."""
    model = command.words[2] if len(command.words) > 2 else ""
    return model if model.startswith("/") else None


def ready_path(command: Command) -> str:
    """What says whether a balancer may send work."""
    return "/plimsoll/ready" if command.has_gate else "/health"


def leaving_s(settings: Settings) -> int:
    """How long the gate is given before SIGTERM: for the balancer to stop, and longer where vLLM cannot drain by itself."""
    command = launched(settings)
    return settings.timers.drain_s if "--shutdown-timeout" in command.words else settings.timers.shutdown_s


def launched(settings: Settings) -> Command:
    """The command of settings that have one."""
    assert settings.command is not None, "launch files are made from a plan alone"
    return settings.command


# What `plimsoll plan --json` printed, read back: the figures that files are made from, and the command that was planned.

SCHEMA = "plimsoll.plan/1"


def facts_of(plan: Mapping[str, Any], name: str) -> PlanFacts:
    """The figures of a plan; BadInput, with the file's name, for anything else."""
    if plan.get("schema") != SCHEMA:
        raise BadInput(f"{name}: not a plan; plimsoll plan --json ... writes one")
    if "compare" in plan:
        raise BadInput(f"{name}: several plans side by side; files are made from the plan of one command, without --compare")
    reader = _Reader(plan, name)
    connector = reader.there("settings", "kv_connector")
    return PlanFacts(
        model=reader.text("model"),
        fits=reader.there("fits") is True,
        gpu=reader.text("gpu", "name"),
        gpus=reader.whole("gpu", "count"),
        requested_bytes=reader.whole("ledger", "requested", "value"),
        weights_bytes=reader.whole("ledger", "weights", "value"),
        kv_bytes=reader.whole("ledger", "kv", "value"),
        slack_bytes=reader.whole("ledger", "slack", "value"),
        kv_tokens=reader.whole("kv", "tokens"),
        tensor_parallel=reader.whole("settings", "tensor_parallel_size"),
        pipeline_parallel=reader.whole("settings", "pipeline_parallel_size"),
        kv_connector=connector if isinstance(connector, str) else None,
    )


def release_of(plan: Mapping[str, Any], name: str) -> str:
    """The vLLM release that was planned for."""
    return _Reader(plan, name).text("vllm")


def planned_line(plan: Mapping[str, Any], name: str) -> str:
    """The planned command as one line of shell, its secrets hidden."""
    line = _Reader(plan, name).text("flags", "rewritten")
    if "\n" in line:
        raise BadInput(f"{name}: it plans several commands; files are made from one")
    return line


def why_it_does_not_fit(plan: Mapping[str, Any]) -> str:
    """The first finding's title, of a plan that does not fit."""
    findings = plan.get("findings")
    first = findings[0] if isinstance(findings, list) and findings else None
    title = first.get("title") if isinstance(first, dict) else None
    return title if isinstance(title, str) else "too little memory"


class _Reader:
    """Values at a path, each checked for what it is."""

    def __init__(self, plan: Mapping[str, Any], name: str) -> None:
        self._plan, self._name = plan, name

    def there(self, *path: str) -> object:
        found: object = self._plan
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def text(self, *path: str) -> str:
        found = self.there(*path)
        if not isinstance(found, str) or not found or not found.replace("\n", " ").isprintable():
            raise BadInput(f"{self._name}: the plan has no {'.'.join(path)}")
        return found

    def whole(self, *path: str) -> int:
        found = self.there(*path)
        if not isinstance(found, int) or isinstance(found, bool) or abs(found) > 2**60:
            raise BadInput(f"{self._name}: the plan has no {'.'.join(path)}")
        return found
