"""A vLLM general plugin: steps run out of device memory at chosen sites, as often as a file says while the server runs.

PLIMSOLL_LAB_FAULTS names that file. It holds {"faults": [RULE, ...], "keep_cache": false, "keep_adapters": false}; without it
there are no faults. A rule is

    {"site": "forward", "times": 1}                                 the next time
    {"site": "sampler", "every": 7}                                 every seventh call of the site
    {"site": "logits", "share": 0.05, "seed": 3}                    a random share of the calls
    {"site": "forward", "above": 256}                               every step of more than so many tokens
    {"site": "forward", "request": "cmpl-a", "outputs": 5}          steps with a request whose id holds this, which has so many
                                                                    output tokens so far (without "outputs": every such step)

and "until" (seconds since the epoch) and "times" end any of them. Sites: see SITES. Each fault raised is one line of JSON in
the file's name with ".raised" behind it. "keep_cache" makes vLLM keep its prefix cache where it is told to empty it, and
"keep_adapters" an adapter in its slot where it is told to take it out: what containment would be without either.
PLIMSOLL_LAB_LIVELY=1 gives a model without weights lively ones. As with `oom_anywhere`, this folder is a whole distribution:
PYTHONPATH and VLLM_PLUGINS are enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import sys
import time
import types
from collections.abc import Callable
from typing import Any

SETTING = "PLIMSOLL_LAB_FAULTS"
LIVELY = "PLIMSOLL_LAB_LIVELY"
TEXT = (
    "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.10 GiB is free. "
    "Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 76.27 GiB is allocated by "
    "PyTorch, and 388.27 MiB is reserved by PyTorch but unallocated."
)
SITES = {
    "early": "before the worker has taken note of the step's requests",
    "forward": "before the forward pass has written anything",
    "layer": "in the second layer: the first has written its part of the KV cache",
    "logits": "the logits of the tokens to sample from",
    "sampler": "before sampling",
    "sampled": "after sampling, as where the log-probabilities of the sampled tokens are gathered",
    "prompt_logprobs": "the logits of a prompt whose log-probabilities are wanted",
    "encoder": "before a picture is encoded",
    "encoded": "after a picture is encoded and its encoding kept",
    "adapter": "in the middle of copying a LoRA adapter into its slot",
    "drafter": "before draft tokens are proposed",
}
LINEARS_OF_A_LAYER = 4
MODULES_COPIED = 2  # of an adapter, before the failure


class Control:
    """The rules as the file has them now, what each has done so far, and the step that runs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rules: list[dict[str, Any]] = []
        self.keeps_cache = self.keeps_adapters = False
        self.tokens = 0
        self.outputs: dict[str, int] = {}
        """Output tokens so far of each request in the step."""
        self._stamp: tuple[int, int] | None = None

    def look(self) -> None:
        """Read the file again if it is another one than the last time."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - several times a step
        except OSError:
            self.rules, self.keeps_cache, self.keeps_adapters, self._stamp = [], False, False, None
            return
        if (stamp := (found.st_mtime_ns, found.st_ino)) != self._stamp:
            with open(self.path, encoding="utf-8") as file:  # noqa: PTH123
                content = json.load(file)
            self.rules, self._stamp = content["faults"], stamp
            self.keeps_cache, self.keeps_adapters = content.get("keep_cache", False), content.get("keep_adapters", False)
            for rule in self.rules:
                rule["dice"] = random.Random(rule.get("seed", 0))
                rule["calls"] = rule["raised"] = 0

    def begin(self, scheduler_output: Any) -> None:
        """Remember what the step consists of."""
        self.look()
        self.tokens = scheduler_output.total_num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        self.outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        self.outputs |= {new.req_id: 0 for new in scheduler_output.scheduled_new_reqs}

    def fail_if_due(self, site: str) -> None:
        """Raise torch's out-of-memory error if a rule says so."""
        for rule in self.rules:
            if rule["site"] == site and self.is_due(rule):
                rule["raised"] += 1
                self.note(site)
                raise importlib.import_module("torch").OutOfMemoryError(TEXT)

    def is_due(self, rule: dict[str, Any]) -> bool:
        """Whether this call is one to fail; counts the call."""
        rule["calls"] += 1
        if rule["raised"] >= rule.get("times", rule["raised"] + 1) or time.time() > rule.get("until", float("inf")):
            return False
        if "request" in rule:
            wanted = rule.get("outputs")
            found = (count for name, count in self.outputs.items() if rule["request"] in name)
            return any(wanted is None or count == wanted for count in found)
        if "above" in rule:
            return self.tokens > int(rule["above"])
        if "every" in rule:
            return bool(rule["calls"] % rule["every"] == 0)
        return bool(rule["dice"].random() < rule.get("share", 1.0))

    def note(self, site: str) -> None:
        """Write down that a fault was raised."""
        fault = {"at": time.time(), "site": site, "tokens": self.tokens, "requests": len(self.outputs)}
        with open(self.path + ".raised", "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(fault) + "\n")


def register() -> None:
    """Wrap the sites; called by vLLM once in each of its processes, maybe more often."""
    path = os.environ.get(SETTING, "")
    if os.environ.get(LIVELY) == "1":
        do_without_torchvision()
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    if not path or hasattr(runner, "survive_faults"):
        return
    runner.survive_faults = control = Control(path)
    wrap_step(runner, control)
    wrap_forward(runner, control)
    wrap_sampling(runner, control)
    wrap_encoder_and_adapter(runner, control)
    wrap_cache(control)
    mend_seeds(runner)
    if os.environ.get(LIVELY) == "1":
        wrap(importlib.import_module("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader, "load_weights", lively)


def wrap(owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function in the place of another, which it is given."""
    setattr(owner, name, made(getattr(owner, name)))


def failing(control: Control, before: str | None, after: str | None = None) -> Callable[..., Any]:
    """A wrapper that may fail before the call, after it, or both."""

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_call(*args: Any, **kwargs: Any) -> Any:
            if before:
                control.fail_if_due(before)
            result = real(*args, **kwargs)
            if after:
                control.fail_if_due(after)
            return result

        return fail_or_call

    return made


def wrap_step(runner: Any, control: Control) -> None:
    """Learn of each step, and fail before anything of it is done."""

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            control.begin(scheduler_output)
            if control.tokens:
                control.fail_if_due("early")
            return real(self, scheduler_output, *args, **kwargs)

        return execute_model

    wrap(runner, "execute_model", made)


def wrap_forward(runner: Any, control: Control) -> None:
    """Fail before the forward pass, in the middle of it, or in the logits after it."""
    linears = [-1]  # calls in this forward pass; -1 outside of one

    def forward(real: Callable[..., Any]) -> Callable[..., Any]:
        def _model_forward(*args: Any, **kwargs: Any) -> Any:
            control.fail_if_due("forward")
            linears[0] = 0
            try:
                return real(*args, **kwargs)
            finally:
                linears[0] = -1

        return _model_forward

    def linear(real: Callable[..., Any]) -> Callable[..., Any]:
        def apply(*args: Any, **kwargs: Any) -> Any:
            if linears[0] >= 0:
                linears[0] += 1
                if linears[0] == LINEARS_OF_A_LAYER + 1:
                    control.fail_if_due("layer")
            return real(*args, **kwargs)

        return apply

    wrap(runner, "_model_forward", forward)
    wrap(importlib.import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod, "apply", linear)


def wrap_sampling(runner: Any, control: Control) -> None:
    """Fail in the logits, theirs or the prompt's, around the sampler, and before the drafter."""
    of_prompt = [False]

    def prompt(real: Callable[..., Any]) -> Callable[..., Any]:
        def _get_prompt_logprobs_dict(*args: Any, **kwargs: Any) -> Any:
            of_prompt[0] = True
            try:
                return real(*args, **kwargs)
            finally:
                of_prompt[0] = False

        return _get_prompt_logprobs_dict

    def logits(real: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            control.fail_if_due("prompt_logprobs" if of_prompt[0] else "logits")
            return real(*args, **kwargs)

        return forward

    wrap(runner, "_get_prompt_logprobs_dict", prompt)
    wrap(importlib.import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor, "forward", logits)
    wrap(runner, "_sample", failing(control, "sampler", "sampled"))
    wrap(runner, "propose_draft_token_ids", failing(control, "drafter"))


def wrap_encoder_and_adapter(runner: Any, control: Control) -> None:
    """Fail around the encoder of pictures, and in the middle of copying an adapter."""

    def encoder(real: Callable[..., Any]) -> Callable[..., Any]:
        def _execute_mm_encoder(self: Any, scheduler_output: Any) -> Any:
            due = bool(scheduler_output.scheduled_encoder_inputs)
            if due:
                control.fail_if_due("encoder")
            result = real(self, scheduler_output)
            if due:
                control.fail_if_due("encoded")
            return result

        return _execute_mm_encoder

    copied = [-1]  # modules of the adapter that is being copied; -1 where none is

    def activate(real: Callable[..., Any]) -> Callable[..., Any]:
        def activate_adapter(*args: Any, **kwargs: Any) -> Any:
            copied[0] = 0
            try:
                return real(*args, **kwargs)
            finally:
                copied[0] = -1

        return activate_adapter

    def weights(real: Callable[..., Any]) -> Callable[..., Any]:
        def _get_lora_layer_weights(*args: Any, **kwargs: Any) -> Any:
            if copied[0] >= 0:
                copied[0] += 1
                if copied[0] == MODULES_COPIED + 1:
                    control.fail_if_due("adapter")
            return real(*args, **kwargs)

        return _get_lora_layer_weights

    def deactivate(real: Callable[..., Any]) -> Callable[..., Any]:
        def deactivate_adapter(*args: Any, **kwargs: Any) -> Any:
            return False if control.keeps_adapters else real(*args, **kwargs)

        return deactivate_adapter

    wrap(runner, "_execute_mm_encoder", encoder)
    manager = importlib.import_module("vllm.lora.model_manager").LoRAModelManager
    wrap(manager, "activate_adapter", activate)
    wrap(manager, "deactivate_adapter", deactivate)
    wrap(manager, "_get_lora_layer_weights", weights)


def wrap_cache(control: Control) -> None:
    """Keep the prefix cache where the file says so, and say that it was emptied."""

    def made(real: Callable[..., Any]) -> Callable[..., Any]:
        def reset_prefix_cache(self: Any) -> Any:
            control.look()
            return True if control.keeps_cache else real(self)

        return reset_prefix_cache

    wrap(importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager, "reset_prefix_cache", made)


def mend_seeds(runner: Any) -> None:
    """Let the CPU build chunk the prompt of a seeded request, as a GPU does.

    What is sampled behind a part of a prompt is thrown away, and vLLM takes the generator one draw back, by an offset that
    generators of a CPU do not have: any seeded prompt in two parts ends the engine. Here the whole state is put back.
    """

    def sample(real: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
            batch = self.input_batch
            dropped = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
            states = [(batch.generators[row], batch.generators[row].get_state()) for row in dropped if row in batch.generators]
            result = real(self, *args, **kwargs)
            for generator, state in states:
                generator.set_state(state)
            return result

        return _sample

    def keep_books(real: Callable[..., Any]) -> Callable[..., Any]:
        def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            kept, self.input_batch.generators = self.input_batch.generators, {}
            try:
                return real(self, *args, **kwargs)
            finally:
                self.input_batch.generators = kept

        return _bookkeeping_sync

    wrap(runner, "_sample", sample)
    wrap(runner, "_bookkeeping_sync", keep_books)


def lively(real: Callable[..., Any]) -> Callable[..., Any]:
    """Random weights that are not small, the same ones at every start: every token then depends on all before it."""

    def load_weights(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        real(self, model, *args, **kwargs)
        dice = importlib.import_module("torch").Generator().manual_seed(7)
        for name, values in model.named_parameters():
            if values.dim() > 1:
                values.data.normal_(0.0, 1.0 if "embed" in name else 3.0 / values.shape[-1] ** 0.5, generator=dice)
            else:
                values.data.fill_(0.0 if name.endswith("bias") else 1.0)

    return load_weights


def do_without_torchvision() -> None:
    """Let vLLM import its LLaVA, which takes one function of Pixtral's picture processor along, and with it torchvision."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    if importlib.util.find_spec("torchvision") is None and name not in sys.modules:
        sys.modules[name] = module = types.ModuleType(name)
        module._num_image_tokens = None  # type: ignore[attr-defined]  # noqa: SLF001
