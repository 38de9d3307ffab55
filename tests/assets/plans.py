"""Plans as `plimsoll plan --json` prints them, drawn at random, and what is made from them."""

from __future__ import annotations

import json
import random
from typing import Any

from plimsoll.assets.launch_command import REFUSED, Ready, facts_of, planned_line, ready, release_of
from plimsoll.assets.settings import AssetSettings
from plimsoll.errors import PlimsollError
from plimsoll.launch.command_line import launches_in
from plimsoll.plan.options import ServerOptions, memory_of
from plimsoll.plan.read import read_command
from plimsoll.render.plan import as_json
from plimsoll.vllm.flags import FlagRow, flags_of
from plimsoll.vllm.versions import engine_named

WHEEL = "plimsoll_inside-0.1.0-py3-none-any.whl"
MODELS = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B")
CARDS = ("H100", "H200", "L40S", "MI300X")
SECRET = "sk-0123456789abcdefghij"
WISHES: tuple[tuple[str, ...], ...] = (
    ("--max-model-len", "8k"), ("--max-model-len=4096",), ("--gpu-memory-utilization", "0.85"), ("--max-num-seqs", "64"),
    ("--no-enable-prefix-caching",), ("--kv-cache-dtype", "fp8"), ("--enforce-eager",), ("--api-key", SECRET),
    ("--hf-token", "hf_abcdefghijklmnopqrstuvwxyz012345"), ("--served-model-name", "one", "two"), ("--port", "9001"),
    ("--host", "127.0.0.1"), ("--host=::1",), ("--shutdown-timeout", "5"), ("--shutdown-timeout", "120"),
    ("--shutdown-timeout", "40000"), ("--hf-overrides", '{"a": {"b": "$(x) $HOME $$ \\"q\\" 100% \'s"}}'),
    ("--chat-template", "{{ messages }} it's %h ${HOME} # no comment"), ("--enable-sleep-mode",), ("-O3",),
    ("--worker-extension-cls", "my.Extension"), ("--middleware", "my.Middleware"), ("--tensor-parallel-size", "2"),
    ("--api-server-count", "2"), ("--max-num-queued-reqs", "100"), ("--allowed-origins", '["*"]'), ("--seed", "7"),
    ("--override-generation-config", '{"temperature": 0.5}'), ("--enable-chunked-prefill",), ("--kv-offloading-size", "8"),
)  # fmt: skip
VARIABLES: tuple[tuple[str, ...], ...] = (
    (), ("VLLM_LOGGING_LEVEL=DEBUG",), ("CUDA_VISIBLE_DEVICES=0,1",), ("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345",),
    ("PYTHONPATH=/opt/mine",), ("MY_NOTE=50% of $5 'quoted' # $(date)",), ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512",),
)  # fmt: skip
# What these name is read while the line is parsed, or wants something beside it.
_NOT_DRAWN = frozenset(
    "--config --model --lora-modules --chat-template --tool-call-parser --grpc-port --enable-auto-tool-choice --tool-server"
    " --enable-log-outputs --enable-per-request-metrics --sse-keep-alive-interval --mm-processor-device --port --host"
    " --middleware --worker-extension-cls --kv-cache-dtype --shutdown-timeout --api-key --hf-token --load-format".split()
)


def plan_of(*words: str, gpu: str = "H100", memory_gib: str = "1000", vllm: str = "0.32.0") -> dict[str, Any]:
    """What `plimsoll plan --json` prints for a command; on a card so large that everything fits."""
    memory = memory_of(memory_gib, "--gpu-memory-gib")
    options = ServerOptions(gpu=gpu, gpu_memory_gib=memory, vllm=vllm, verbatim=words)
    plan: dict[str, Any] = json.loads(as_json(read_command(options, "plan").plan()))
    return plan


def random_plan(dice: random.Random) -> dict[str, Any]:
    """A plan that fits and can be launched, of a command that was thrown together."""
    rows = sorted({row.name: row for row in flags_of("0.32.0").values()}.items())
    drawn = [row for name, row in rows if name not in _NOT_DRAWN and name not in REFUSED and _is_simple(row)]
    while True:
        words = [*dice.choice(VARIABLES), "vllm", "serve", dice.choice(MODELS)]
        for wish in dice.sample(WISHES, dice.randrange(6)):
            words += wish
        for row in dice.sample(drawn, dice.randrange(4)):
            words += [row.name, *_value(row)]
        try:
            plan = plan_of(*(["env"] if "=" in words[0] else []), *words, gpu=dice.choice(CARDS))
            if plan["fits"]:
                made_ready(plan)
                return plan
        except PlimsollError:
            continue  # two of them do not go together; draw again


def _is_simple(row: FlagRow) -> bool:
    return not row.takes_value or bool(row.choices) or row.kind in ("int", "float")


def _value(row: FlagRow) -> list[str]:
    if not row.takes_value:
        return []
    value = row.choices[0] if row.choices else {"int": "2", "float": "0.5"}[row.kind]
    return [value] * (row.nargs if isinstance(row.nargs, int) else 1)


def made_ready(plan: dict[str, Any]) -> Ready:
    """The plan's command, ready to be launched."""
    launch = launches_in(planned_line(plan, "plan.json"))[0]
    return ready(launch, engine_named(release_of(plan, "plan.json")), facts_of(plan, "plan.json"))


def settings_of(plan: dict[str, Any]) -> AssetSettings:
    """What the files are made from."""
    made = made_ready(plan)
    return AssetSettings(
        release_of(plan, "plan.json"), facts_of(plan, "plan.json"), made.command, timers=made.timers, wheel=WHEEL,
        made_by=("Made by a test.",),
    )  # fmt: skip
