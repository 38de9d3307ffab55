"""What the files of every way to launch have in common: images, words, paths, and how long the gate is given."""

from __future__ import annotations

from plimsoll.assets.settings import Command, Settings
from plimsoll.assets.texts import flag_lines
from plimsoll.domain.gpu import Vendor, gpu_named
from plimsoll.errors import BadInput

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
