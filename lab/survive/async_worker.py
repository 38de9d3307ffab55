"""A worker without a model, for vLLM's own engine core: it keeps the state that vLLM's runners keep, and nothing forgives it.

The next token of a request is a hash of what the KV cache holds for it, so that an unwritten or foreign block, a lost or a
repeated token changes every token after it. What a real runner would crash on, it crashes on: a request it does not know,
blocks it was not given, another count of computed tokens. `FirstRunner` and `SecondRunner` follow vLLM's two runners
(v1/worker/gpu_model_runner.py: `_update_states`, `_prepare_input_ids`, `_bookkeeping_sync`; v1/worker/gpu/model_runner.py).

Runs under the engine's own Python; `torch` and vLLM are imported there alone.
"""

from __future__ import annotations

import importlib
import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

VOCABULARY = 2048
FIRST_TOKEN = 3  # 0 to 2 are special
PLACEHOLDER = -1  # sampled, and still on the device
UNWRITTEN = -2
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
TEXT = "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.10 GiB is free."
EXECUTE_SITES = ("early", "forward", "half", "logits")
SAMPLE_SITES = ("sampler", "sampled", "copy")
SITES = EXECUTE_SITES + SAMPLE_SITES


def next_token(tokens: Sequence[int], allowed: Sequence[int] | None = None) -> int:
    """The token that follows these; one of the allowed ones where not all are."""
    mixed = zlib.crc32(array("i", tokens).tobytes())
    if allowed is not None:
        return allowed[mixed % len(allowed)]
    return FIRST_TOKEN + mixed % (VOCABULARY - FIRST_TOKEN)


@dataclass
class Known:
    """What a worker knows of a request."""

    tokens: list[int]
    prompt: int
    blocks: list[int]
    computed: int
    """Tokens computed before the step that runs."""
    after: int = -1
    """Tokens computed after the last step; -1 where there was none."""

    @property
    def outputs(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt


@dataclass
class Faults:
    """Says which steps fail, and where: one of them or two in a row, then some that do not."""

    share: float = 0.0
    dice: random.Random = field(default_factory=random.Random)
    sites: Sequence[str] = SITES
    planned: dict[int, str] = field(default_factory=dict)
    """Of single steps, by their number."""
    pause: int = 8
    """Steps that do not fail after those that did."""
    raised: list[str] = field(default_factory=list)
    step: int = 0
    _site: str = ""
    _burst: int = 0
    _rest: int = 0

    def begin(self) -> None:
        """Choose where this step fails, if it does."""
        self.step += 1
        self._site = self.planned.get(self.step, "")
        if self._burst == 0 and self._rest == 0 and self.dice.random() < self.share:
            self._burst = self.dice.choice((1, 1, 2))
        if self._burst:
            self._burst -= 1
            self._rest = self.pause
            self._site = self.dice.choice(self.sites)
        else:
            self._rest = max(0, self._rest - 1)

    def fail_if_due(self, site: str) -> None:
        """Raise torch's error if this is the site."""
        if self._site == site:
            self._site = ""
            self.raised.append(site)
            raise importlib.import_module("torch").OutOfMemoryError(TEXT)


class Runner:
    """What both runners have in common: the KV cache, and what is computed from it."""

    def __init__(self, config: Any, faults: Faults) -> None:
        self.is_async = bool(config.scheduler_config.async_scheduling)
        self.faults = faults
        self.block_size = 16
        self.cache: dict[tuple[int, int], int] = {}
        self.requests: dict[str, Known] = {}
        self.execute_model_state: Any = None
        self.num_prompt_logprobs: dict[str, int] = {}
        self.steps = 0

    def execute_model(self, planned: Any) -> Any:
        """Compute one step; None where tokens are to be sampled from it."""
        outputs = importlib.import_module("vllm.v1.outputs")
        assert self.execute_model_state is None, "State error: sample_tokens() must be called"
        if planned.total_num_scheduled_tokens:
            self.faults.begin()
            self.steps += 1
            self.faults.fail_if_due("early")
        self.update(planned)
        if not planned.total_num_scheduled_tokens:
            return outputs.EMPTY_MODEL_RUNNER_OUTPUT
        inputs = {name: self.inputs(name, count) for name, count in planned.num_scheduled_tokens.items()}
        self.faults.fail_if_due("forward")
        self.forward(inputs)
        self.faults.fail_if_due("logits")
        self.execute_model_state = (planned, list(inputs))
        return None

    def forward(self, inputs: dict[str, list[int]]) -> None:
        """Write the KV cache of these tokens."""
        written: set[tuple[int, int]] = set()
        for number, (name, tokens) in enumerate(inputs.items()):
            if number >= len(inputs) // 2:
                self.faults.fail_if_due("half")
            known = self.requests[name]
            for place, token in enumerate(tokens, known.computed):
                slot = self.slot(known, place)
                assert slot not in written, f"two requests write {slot}"
                written.add(slot)
                self.cache[slot] = token
            known.after = known.computed + len(tokens)

    def slot(self, known: Known, place: int) -> tuple[int, int]:
        """Where the KV cache of this place lies."""
        block = known.blocks[place // self.block_size]
        assert block > 0, "vLLM's null block"
        return block, place % self.block_size

    def sample_tokens(self, grammar: Any) -> Any:
        """The tokens of the step before; under asynchronous scheduling as something that has them later."""
        outputs = importlib.import_module("vllm.v1.outputs")
        if self.execute_model_state is None:
            return None  # what ran before has failed
        (_planned, names), self.execute_model_state = self.execute_model_state, None
        allowed = allowed_tokens(grammar)
        self.faults.fail_if_due("sampler")
        tokens: list[list[int]] = []
        for name in names:
            known = self.requests[name]
            if known.after < len(known.tokens):
                tokens.append([])  # a part of a prompt: what is sampled after it is thrown away
                continue
            context = [self.cache.get(self.slot(known, place), UNWRITTEN) for place in range(known.after)]
            tokens.append([next_token(context, allowed.get(name))])
        self.keep(names, tokens)
        self.faults.fail_if_due("sampled")
        indices = {name: number for number, name in enumerate(names)}
        output = outputs.ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=tokens)
        if self.is_async:
            return later(output, self.faults)
        self.faults.fail_if_due("copy")
        return output

    def update(self, planned: Any) -> None:
        """Take note of a step's requests."""
        raise NotImplementedError

    def inputs(self, name: str, count: int) -> list[int]:
        """The tokens that a request has in this step."""
        raise NotImplementedError

    def keep(self, names: list[str], tokens: list[list[int]]) -> None:
        """Keep what was sampled for the next step."""
        raise NotImplementedError


class FirstRunner(Runner):
    """Keeps requests over a preemption; under asynchronous scheduling sampled tokens stay on the device for one step."""

    def __init__(self, config: Any, faults: Faults) -> None:
        super().__init__(config, faults)
        self.input_batch = SimpleNamespace(prev_sampled_token_ids=None, prev_req_id_to_index=None, vocab_size=VOCABULARY)
        self.batch: set[str] = set()
        self._draft_token_ids: Any = None

    def update(self, planned: Any) -> None:
        """As `_update_states` does."""
        for name in planned.finished_req_ids:
            self.requests.pop(name, None)
            self.leave(name)
        cached = planned.scheduled_cached_reqs
        for name in self.batch - (set(planned.num_scheduled_tokens) - set(cached.resumed_req_ids)):
            self.leave(name)
        for new in planned.scheduled_new_reqs:
            assert new.req_id not in self.requests, f"{new.req_id} is new for the second time"
            self.requests[new.req_id] = Known(
                list(new.prompt_token_ids), len(new.prompt_token_ids), list(new.block_ids[0]), new.num_computed_tokens
            )
            self.batch.add(new.req_id)
        for number, name in enumerate(cached.req_ids):
            self.update_cached(name, cached, number)

    def leave(self, name: str) -> None:
        """Take a request out of the batch."""
        self.batch.discard(name)
        if self.input_batch.prev_req_id_to_index is not None:
            self.input_batch.prev_req_id_to_index.pop(name, None)

    def update_cached(self, name: str, cached: Any, number: int) -> None:
        """One request that the worker must know already."""
        known, blocks, outputs = self.requests[name], cached.new_block_ids[number], cached.num_output_tokens[number]
        is_resumed, is_in_batch = name in cached.resumed_req_ids, name in self.batch
        known.computed = cached.num_computed_tokens[number]
        if outputs < known.outputs:
            del known.tokens[known.prompt + outputs :]
        if is_resumed:
            assert not is_in_batch, f"{name} is resumed and was never taken out"
            assert blocks is not None, f"{name} is resumed without blocks"
            known.blocks = list(blocks[0])
        else:
            # A step whose forward pass failed has computed nothing, and the engine does not know it yet.
            assert known.computed >= known.after or known.after < 0, f"{name}: {known.computed} computed, not {known.after}"
            known.blocks += blocks[0] if blocks is not None else ()
        if not is_in_batch:
            if self.is_async and outputs > 0:
                known.tokens[known.prompt :] = cached.all_token_ids[name][-outputs:]
            self.batch.add(name)

    def inputs(self, name: str, count: int) -> list[int]:
        """As `_prepare_input_ids` does: what was sampled last comes from the device, whatever the request's own list says."""
        known, batch = self.requests[name], self.input_batch
        tokens = known.tokens[known.computed : known.computed + count]
        tokens += [PLACEHOLDER] * (count - len(tokens))  # a step before this one has failed, and nobody has seen it yet
        if batch.prev_sampled_token_ids is not None and batch.prev_req_id_to_index:
            row = batch.prev_req_id_to_index.get(name)
            if row is not None:
                tokens[-1] = batch.prev_sampled_token_ids[row]
        return tokens

    def keep(self, names: list[str], tokens: list[list[int]]) -> None:
        """As `_bookkeeping_sync` does."""
        batch = self.input_batch
        batch.prev_sampled_token_ids = None
        if self.is_async:
            batch.prev_sampled_token_ids = [sampled[0] if sampled else UNWRITTEN for sampled in tokens]
            batch.prev_req_id_to_index = {name: row for row, name in enumerate(names) if tokens[row]}
        for name, sampled in zip(names, tokens, strict=True):
            self.requests[name].tokens += [PLACEHOLDER] * len(sampled) if self.is_async else sampled


class SecondRunner(Runner):
    """Forgets a request that is preempted and is told of it as a new one."""

    def __init__(self, config: Any, faults: Faults) -> None:
        super().__init__(config, faults)
        self.req_states = SimpleNamespace(req_id_to_index=self.requests)

    def update(self, planned: Any) -> None:
        """As `finish_requests`, `add_requests` and `update_requests` do."""
        for name in (*planned.finished_req_ids, *(planned.preempted_req_ids or ())):
            self.requests.pop(name, None)
        for new in planned.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids)
            prompt = len(new.prompt_token_ids)
            self.requests[new.req_id] = Known(tokens, prompt, list(new.block_ids[0]), new.num_computed_tokens)
        cached = planned.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "the second runner knows no resumed requests"
        for name, computed, blocks in zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True):
            known = self.requests[name]
            assert computed >= known.after, f"{name}: {computed} computed, not {known.after}"
            known.computed = computed
            known.blocks += blocks[0] if blocks is not None else ()

    def inputs(self, name: str, count: int) -> list[int]:
        """The request's own tokens, which stay on the device."""
        known = self.requests[name]
        tokens = known.tokens[known.computed : known.computed + count]
        return tokens + [PLACEHOLDER] * (count - len(tokens))

    def keep(self, names: list[str], tokens: list[list[int]]) -> None:
        """Append what was sampled."""
        for name, sampled in zip(names, tokens, strict=True):
            self.requests[name].tokens += sampled


SecondRunner.__module__ = SECOND_RUNNER  # by which vLLM's second runner is told from the first


def allowed_tokens(grammar: Any) -> dict[str, list[int]]:
    """The tokens that each request with structured output may have next."""
    if grammar is None:
        return {}
    found = {}
    for name, row in zip(grammar.structured_output_request_ids, grammar.grammar_bitmask, strict=False):
        found[name] = [token for token in range(VOCABULARY) if row[token // 32] >> (token % 32) & 1]
    return found


def later(output: Any, faults: Faults) -> Any:
    """The output as vLLM's runners give it under asynchronous scheduling: asked for when the next step runs already."""
    kind = importlib.import_module("vllm.v1.outputs").AsyncModelRunnerOutput

    class Later(kind):  # type: ignore[misc, valid-type]
        """One step's output."""

        def get_output(self) -> Any:
            """The output, or the error of copying it."""
            if self.error is not None:
                raise self.error
            return output

    made = Later()
    made.error = None
    try:
        faults.fail_if_due("copy")
    except Exception as error:
        made.error = error
    return made


class Worker:
    """One rank: answers what the engine core asks at its start, and passes steps on to the runner."""

    def __init__(self, config: Any, faults: Faults, *, is_second: bool) -> None:
        self.config = config
        self.device = SimpleNamespace(type="cpu")
        self.model_runner = (SecondRunner if is_second else FirstRunner)(config, faults)
        self.execute_model: Callable[..., Any] = self.model_runner.execute_model
        self.sample_tokens: Callable[..., Any] = self.model_runner.sample_tokens

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """One layer of full attention."""
        specs, torch = importlib.import_module("vllm.v1.kv_cache_interface"), importlib.import_module("torch")
        size = self.model_runner.block_size
        return {"layer.0": specs.FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)}

    def determine_available_memory(self) -> int:
        """More than enough: `num_gpu_blocks_override` says how many blocks there are."""
        return 1 << 30

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """The plain one."""
        return ["LBNHC"]

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text."""
        return ("generate",)

    def compile_or_warm_up_model(self) -> Any:
        """Nothing to compile."""
        return importlib.import_module("vllm.v1.worker.worker_base").CompilationTimes(language_model=0.0, encoder=0.0)

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """What needs no answer."""
        del args, kwargs

    set_kv_cache_layout = initialize_from_config = reset_mm_cache = reset_encoder_cache = shutdown = nothing
    synchronize_device = update_max_model_len = nothing
