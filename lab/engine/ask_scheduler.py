"""Drives vLLM's own scheduler over small traces: JSON lines in on stdin, JSON lines out. ask_scheduler.py MODEL_FOLDER

Run by the engine's own Python; `lab.engine.scheduler` is the other end. Scheduler, cache manager and block pool are vLLM's; the
model is replaced by a clock of whole nanoseconds, so two runs of a case are equal to the digit. A request is

    {"requests": [{"arrival_ns": 0, "prompt": 40, "output": 3, "priority": 0, "ids": [7, 8]}, ...], "prefix_block": 512,
     "settings": {"num_blocks": 64, ..., "groups": [{"kind": "sliding", "block_size": 16, "window": 64}]},
     "step_time": {"base_ns": ..., "token_ns": ..., "seq_ns": ..., "ctx_ps": ...}, "blocks": false,
     "turns": [[3, {"max-num-seqs": 2}], ...]}           # knobs, from a step on: plimsoll.inside's own turn them

with the fields of `plimsoll.simulate.settings`: all that are set. A request may name its "adapter", a number. The answer is
{"ok": true, "steps": [[16 integers], ...],
"requests": [[9 integers or null], ...], "summary": {...}}; where vLLM would never end, "ok" is false and "error" is "deadlock"
(nothing can be scheduled) or "endless" (stopped at "most_steps" steps).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

UNIQUE = 10**9  # first token of a prompt that shares nothing
GENERATED = 2 * 10**9  # what a request generates, so that no two share it
BITS, GOLDEN, DRAFT_DICE, SHARE_BITS = (1 << 64) - 1, 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 30
MOST_IDLE_PASSES = 1000
"""Calls of schedule() in a row that neither run nor finish anything: a preemption may cause one, never this many."""
MOST_STEPS = 60_000
"""vLLM may preempt and compute the same tokens again without end; a case can name its own limit, "most_steps"."""


def private_stdout() -> TextIO:
    """The pipe to whoever asks; from now on everything else that prints to stdout reaches stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


def prompt_tokens(number: int, request: dict[str, Any], prefix_block: int) -> list[int]:
    """The prompt as tokens: as many of each prefix id as a trace block has, or a beginning that nobody else has."""
    length = request["prompt"]
    if not request.get("ids"):
        return [UNIQUE + number] + [1] * (length - 1)
    return [one for one in request["ids"] for _ in range(prefix_block)][:length]


def mixed(left: int, right: int) -> int:
    """Both numbers as one of 64 bits, as the simulator mixes them."""
    x = (left * GOLDEN + right + GOLDEN) & BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return x ^ (x >> 31)


def mamba_mode(settings: dict[str, Any]) -> str:
    """States are aligned to blocks exactly when there is prefix caching."""
    return "align" if settings["prefix_caching"] else "none"


class Vllm:
    """What is needed of vLLM, imported once, and one configuration whose figures each case sets anew."""

    def __init__(self, model: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self.utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self.sync: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
        self.overlapped: Any = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
        self.request: Any = importlib.import_module("vllm.v1.request").Request
        self.sampling: Any = importlib.import_module("vllm.sampling_params").SamplingParams
        self.output: Any = importlib.import_module("vllm.v1.outputs").ModelRunnerOutput
        self.drafts: Any = importlib.import_module("vllm.v1.outputs").DraftTokenIds
        self.speculative: Any = importlib.import_module("vllm.config.speculative").SpeculativeConfig
        self.lora: Any = importlib.import_module("vllm.lora.request").LoRARequest
        self.front: Any = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        self.outputs: Any = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
        self.multimodal: Any = importlib.import_module("vllm.multimodal.inputs")
        self.encoders: Any = importlib.import_module("vllm.v1.core.encoder_cache_manager").EncoderCacheManager
        self.refusals: Any = importlib.import_module("vllm.exceptions")
        arguments: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        self.config: Any = arguments(
            model=model, load_format="dummy", max_model_len=2048, enforce_eager=True, skip_tokenizer_init=True
        ).create_engine_config()
        importlib.import_module("vllm.v1.core.single_type_kv_cache_manager").register_all_kvcache_specs(self.config)
        self.hash: Any = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name("sha256")
        self.utils.init_none_hash(self.hash)
        self.grammars: Any = importlib.import_module("vllm.v1.structured_output").StructuredOutputManager(self.config)

    def configure(self, settings: dict[str, Any]) -> None:
        """Set what the scheduler reads of the configuration; a real start-up rounds and replaces nothing of it later."""
        config = self.config
        config.model_config.max_model_len = settings["max_model_len"]
        limits = config.scheduler_config
        limits.max_num_seqs = settings["max_num_seqs"]
        limits.max_num_batched_tokens = settings["max_num_batched_tokens"]
        limits.max_num_scheduled_tokens = None
        limits.enable_chunked_prefill = settings["chunked_prefill"]
        limits.long_prefill_token_threshold = settings["long_prefill_token_threshold"]
        limits.async_scheduling = settings["async_scheduling"]
        limits.watermark = settings["watermark"]
        limits.scheduler_reserve_full_isl = settings["reserve_full_isl"]
        limits.policy = settings["policy"]
        limits.max_num_queued_reqs = settings.get("max_num_queued_reqs")
        limits.max_num_queued_tokens = settings.get("max_num_queued_tokens")
        config.lora_config = SimpleNamespace(max_loras=settings["max_loras"]) if "max_loras" in settings else None
        config.speculative_config = self.drafter(settings["speculation"]) if "speculation" in settings else None
        cache = config.cache_config
        cache.enable_prefix_caching = settings["prefix_caching"]
        cache.num_gpu_blocks = settings["num_blocks"]
        groups = settings["groups"]
        # The engine itself takes the smallest of the groups' sizes once it knows them.
        cache.block_size = min(group["block_size"] for group in groups) if groups else settings["block_size"]
        has_states = any(group["kind"] == "mamba" for group in groups)
        cache.mamba_cache_mode = mamba_mode(settings) if has_states else "none"

    def inputs_of(self, number: int, asked: dict[str, Any], prefix_block: int) -> list[Any]:
        """The request's pictures at the beginning of its prompt; equal beginnings have equal pictures."""
        found, begin, ids = [], 0, asked.get("ids") or ()
        for place, tokens in enumerate(asked.get("images", ())):
            block = begin // prefix_block
            content = (ids[: block + 1], begin, tokens) if block < len(ids) else (number, place)
            position = self.multimodal.PlaceholderRange(offset=begin, length=tokens)
            found.append(
                self.multimodal.MultiModalFeatureSpec(
                    data=None, modality="image", identifier=json.dumps(content), mm_position=position
                )
            )
            begin += tokens
        return found

    def drafter(self, speculation: dict[str, Any]) -> Any:
        """vLLM's own configuration of a drafter that keeps so many slots ahead; no draft model is read."""
        tokens, drops = speculation["tokens"], speculation["drops_block"]
        method = "eagle3" if speculation["lookahead"] else "ngram"
        if speculation["lookahead"] == tokens + 1:
            method = "dflash"
        elif speculation["slots"]:
            method = "draft_model"
        found = object.__new__(self.speculative)
        for name in ("draft_model_config", "num_speculative_tokens_per_batch_size"):
            object.__setattr__(found, name, None)
        found.method, found.num_speculative_tokens = method, tokens
        found.parallel_drafting, found.disable_eagle_block_drop = False, not drops
        return found

    def spec(self, group: dict[str, Any], mode: str) -> Any:
        """vLLM's own description of one group; heads and state sizes do not matter to the scheduler."""
        size = group["block_size"]
        if group["kind"] == "mamba":
            saved = group.get("checkpoint_blocks", 0)  # 1 for Mamba2 layers, which save a state in the middle of a chunk
            return self.specs.MambaSpec(
                block_size=size,
                shapes=((1,),),
                dtypes=(self.torch.float32,),
                mamba_cache_mode=mode,
                num_prefill_checkpoint_blocks=saved,
                prefill_checkpoint_alignment=1 if saved else None,
            )
        common = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": self.torch.float32}
        if group["kind"] == "sliding":
            return self.specs.SlidingWindowSpec(sliding_window=group["window"], **common)
        return self.specs.FullAttentionSpec(**common)

    def scheduler(self, settings: dict[str, Any]) -> tuple[Any, Any]:
        """A scheduler as the engine core would build it, and the function that hashes its requests' blocks."""
        self.configure(settings)
        config = self.config
        groups = settings["groups"] or [{"kind": "full", "block_size": settings["block_size"]}]
        pool = self.specs.KVCacheConfig(
            num_blocks=settings["num_blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[
                self.specs.KVCacheGroupSpec([f"layer.{number}"], self.spec(group, mamba_mode(settings)))
                for number, group in enumerate(groups)
            ],
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        )
        block_size, hash_block_size = self.utils.resolve_kv_cache_block_sizes(pool, config)
        kind = self.overlapped if settings["async_scheduling"] else self.sync
        scheduler = kind(
            vllm_config=config,
            kv_cache_config=pool,
            structured_output_manager=self.grammars,
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        if (encoder := settings.get("encoder")) is not None:
            # As a model with pictures sets them; none of the largest is beyond either.
            scheduler.max_num_encoder_input_tokens = encoder["budget"]
            scheduler.encoder_cache_manager = self.encoders(cache_size=encoder["cache"])
        hasher = self.utils.get_request_block_hasher(hash_block_size, self.hash) if settings["prefix_caching"] else None
        return scheduler, hasher

    def knobs(self, scheduler: Any) -> Any:
        """The knobs that plimsoll puts around this scheduler."""
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
        inside: Any = importlib.import_module("plimsoll.inside.knobs")
        knobs = inside.Knobs(inside.VllmScheduler(SimpleNamespace(scheduler=scheduler, vllm_config=self.config)))
        inside.follow_steps(scheduler, knobs)
        return knobs


class Record:
    """What became of one request."""

    def __init__(self, number: int, arrival_ns: int, request: Any) -> None:
        self.number, self.arrival_ns, self.request = number, arrival_ns, request
        self.first_sched_ns: int | None = None
        self.first_token_ns: int | None = None
        self.finish_ns: int | None = None
        self.produced = self.cached_tokens = 0

    def row(self) -> list[int | None]:
        """Its line in the answer."""
        stamps = [self.first_sched_ns, self.first_token_ns, self.finish_ns]
        request = self.request
        counts = [request.num_prompt_tokens, self.produced, request.num_preemptions, self.cached_tokens]
        return [self.number, self.arrival_ns, *stamps, *counts]


class Run:
    """One case from its first arrival to its last token."""

    def __init__(self, vllm: Vllm, case: dict[str, Any]) -> None:
        self.vllm, self.case, self.settings = vllm, case, case["settings"]
        self.scheduler, self.hasher = vllm.scheduler(self.settings)
        self.manager = self.scheduler.kv_cache_manager
        self.turns = deque(case.get("turns", ()))
        if self.turns:
            self.knobs = vllm.knobs(self.scheduler)
        self.usable = self.settings["num_blocks"] - 1  # all but the null block
        self.waiting_to_arrive = deque(enumerate(case["requests"]))
        self.records: dict[str, Record] = {}
        self.rejected: list[int] = []
        self.flying: deque[tuple[Any, int, set[str]]] = deque()  # batch, when it ends, who gets a token from it
        self.depth = 2 if self.settings["async_scheduling"] else 1
        self.prefilling: dict[str, Any] = {}  # the requests as the API server sees them
        self.now_ns = self.device_free_ns = 0
        self.preemptions = self.idle_passes = 0
        self.queried = self.hit = self.queried_again = self.hit_again = 0
        self.steps: list[list[int]] = []
        self.tables: list[dict[str, list[list[int]]]] = []

    def answer(self) -> dict[str, Any]:
        """Run it to the end."""
        while len(self.steps) < self.case.get("most_steps", MOST_STEPS):
            self.admit_arrivals()
            if len(self.flying) < self.depth and self.scheduler.has_unfinished_requests():
                while self.turns and len(self.steps) >= self.turns[0][0]:
                    order = {"lease_s": 86_400, "values": self.turns.popleft()[1]}
                    told = json.loads(self.knobs.answer(json.dumps(order)))
                    assert "refused" not in told, told["refused"]
                batch = self.scheduler.schedule()
                preempted = len(batch.preempted_req_ids or ())
                self.preemptions += preempted
                if batch.total_num_scheduled_tokens:
                    self.idle_passes = 0
                    self.launch(batch, preempted)
                    if len(self.flying) < self.depth:
                        continue
                elif not self.flying:
                    self.idle_passes += 1
                    if preempted == 0 and self.waiting_to_arrive:
                        self.now_ns = self.arrival_ns()
                    elif preempted == 0 or self.idle_passes > MOST_IDLE_PASSES:
                        return self.result("deadlock")
                    continue
            if self.flying:
                self.land(*self.flying.popleft())
            elif not self.scheduler.has_unfinished_requests():
                if not self.waiting_to_arrive:
                    return self.result()
                self.now_ns = max(self.now_ns, self.arrival_ns())
        return self.result("endless")

    def arrival_ns(self) -> int:
        """When the next request arrives."""
        arrival: int = self.waiting_to_arrive[0][1]["arrival_ns"]
        return arrival

    def admit_arrivals(self) -> None:
        """Hand the scheduler whatever has arrived by now, in the order of the trace."""
        limit = self.settings["max_model_len"]
        groups = self.settings["groups"]
        # Only an unbounded group has a capacity in tokens; a case with other groups must bring requests that fit alone.
        if not groups:
            limit = min(limit, self.usable * self.settings["block_size"])
        elif len(groups) == 1 and groups[0]["kind"] == "full":
            limit = min(limit, self.usable * groups[0]["block_size"])
        while self.waiting_to_arrive and self.arrival_ns() <= self.now_ns:
            number, asked = self.waiting_to_arrive.popleft()
            if asked["prompt"] + asked["output"] > limit:
                self.rejected.append(number)
                continue
            if not self.is_admitted():
                continue
            # Of equal priority and arrival vLLM takes the smaller id, compared as text: "10" goes before "9".
            name, adapter = str(number), asked.get("adapter", 0)
            request = self.vllm.request(
                request_id=name,
                prompt_token_ids=prompt_tokens(number, asked, self.case["prefix_block"]),
                sampling_params=self.vllm.sampling(max_tokens=asked["output"], ignore_eos=True),
                pooling_params=None,
                arrival_time=asked["arrival_ns"] / 1e9,
                priority=asked["priority"],
                block_hasher=self.hasher,
                mm_features=self.vllm.inputs_of(number, asked, self.case["prefix_block"]),
                lora_request=self.vllm.lora(f"a{adapter}", adapter, "/nowhere") if adapter else None,
            )
            self.prefilling[name] = SimpleNamespace(prompt_len=asked["prompt"], is_prefilling=True)
            self.records[name] = Record(number, asked["arrival_ns"], request)
            self.scheduler.add_request(request)

    def is_admitted(self) -> bool:
        """Asks vLLM's API server, which knows its requests by what has come back of them."""
        states = SimpleNamespace(request_states=self.prefilling)
        front = SimpleNamespace(
            scheduler_config=self.vllm.config.scheduler_config,
            admission_stats=None,
            get_num_unfinished_requests=lambda: len(self.prefilling),
            get_num_queued_tokens=lambda: self.vllm.outputs.get_num_queued_tokens(states),
            _record_admission_rejection=lambda _: None,
        )
        try:
            self.vllm.front.check_admission(front)
        except (self.vllm.refusals.QueueOverflowError, self.vllm.refusals.MaxQueuedTokensError):
            return False
        return True

    def launch(self, batch: Any, preempted: int) -> None:
        """Send a batch to the pretended device and write down its step."""
        lengths = {name: self.scheduler.requests[name].num_computed_tokens for name in batch.num_scheduled_tokens}
        tokens, context = batch.total_num_scheduled_tokens, sum(lengths.values())
        cost = self.case["step_time"]
        start_ns = max(self.now_ns, self.device_free_ns)
        self.device_free_ns = start_ns + cost["base_ns"] + cost["token_ns"] * tokens + cost["seq_ns"] * len(lengths)
        self.device_free_ns += cost["ctx_ps"] * context // 1000
        if (encoder := self.settings.get("encoder")) is not None:
            embeds = sum(
                self.scheduler.requests[name].get_num_encoder_embeds(place)
                for name, places in batch.scheduled_encoder_inputs.items()
                for place in places
            )
            self.device_free_ns += encoder["embed_ps"] * embeds // 1000
        if (drafted := self.settings.get("speculation")) is not None:
            passes = cost["base_ns"] + cost["token_ns"] * tokens
            passes += (drafted["tokens"] - 1) * (cost["base_ns"] + cost["token_ns"] * len(lengths))
            self.device_free_ns += drafted["draft_ppm"] * passes // 1_000_000
        for new in batch.scheduled_new_reqs:
            record = self.records[new.req_id]
            record.first_sched_ns = start_ns if record.first_sched_ns is None else record.first_sched_ns
        # Which of the two lists has the resumed ones depends on vLLM's model runner.
        new_names = [new.req_id for new in batch.scheduled_new_reqs]
        resumed = len(batch.scheduled_cached_reqs.resumed_req_ids)
        resumed += sum(1 for name in new_names if self.scheduler.requests[name].num_preemptions)
        joined = len(new_names) + len(batch.scheduled_cached_reqs.resumed_req_ids) - resumed
        stats = self.manager.prefix_cache_stats
        self.steps.append(
            [
                len(self.steps), start_ns, self.device_free_ns, len(self.scheduler.running), len(self.scheduler.waiting),
                len(lengths), tokens, joined, resumed, preempted, context,
                self.usable - self.manager.block_pool.get_num_free_blocks(),
                *self.tables_now(),
                self.hit + self.hit_again + stats.hits + stats.preempted_hits,
                self.queried + self.queried_again + stats.queries + stats.preempted_queries,
            ]
        )  # fmt: skip
        producing = {name for name in lengths if not self.scheduler.requests[name].is_prefill_chunk}
        self.flying.append((batch, self.device_free_ns, producing))

    def tables_now(self) -> tuple[int, int]:
        """Blocks in the running requests' tables, and slots of them that hold nothing yet.

        A shared block counts once for each holder, a null block never. Slots are counted in full-attention groups alone: the
        other kinds give blocks back, or have one for a whole state, and nothing is left unfilled for lack of tokens.
        """
        blocks = waste = 0
        seen: dict[str, list[list[int]]] = {}
        for request in self.scheduler.running:
            for manager in self.manager.coordinator.single_type_managers:
                table = manager.req_to_blocks.get(request.request_id, ())
                real = sum(1 for block in table if not block.is_null)
                blocks += real
                if type(manager.kv_cache_spec) is self.vllm.specs.FullAttentionSpec:
                    waste += real * manager.block_size - request.num_computed_tokens
                if self.case.get("blocks"):
                    seen.setdefault(request.request_id, []).append([block.block_id for block in table])
        if self.case.get("blocks"):
            self.tables.append(seen)
        return blocks, waste

    def land(self, batch: Any, end_ns: int, producing: set[str]) -> None:
        """The oldest batch is done: its tokens reach the scheduler."""
        self.now_ns = max(self.now_ns, end_ns)
        self.admit_arrivals()
        names = list(batch.num_scheduled_tokens)
        admitted = {new.req_id for new in batch.scheduled_new_reqs} | set(batch.scheduled_cached_reqs.resumed_req_ids)
        tokens: list[list[int]] = []
        for name in names:
            # The drafts of a request that is only filled up to the length of the others come from nobody: none is accepted.
            guessed = 0 if name in admitted else len(batch.scheduled_spec_decode_tokens.get(name, ()))
            accepted = self.accepted(self.records[name], guessed) if guessed else 0
            tokens.append([GENERATED + int(name)] * (1 + accepted) if name in producing else [])
        places = {name: place for place, name in enumerate(names)}
        made = self.vllm.output(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)
        for outputs in self.scheduler.update_from_output(batch, made).values():
            stats = outputs.scheduler_stats and outputs.scheduler_stats.prefix_cache_stats
            if stats is not None:
                self.queried += stats.queries
                self.hit += stats.hits
                self.queried_again += stats.preempted_queries
                self.hit_again += stats.preempted_hits
            for output in outputs.outputs:
                self.note(self.records[output.request_id], output)
        if "speculation" in self.settings and not self.settings["async_scheduling"]:
            drafts = [[0] * self.settings["speculation"]["tokens"] for _ in names]
            self.scheduler.update_draft_token_ids(self.vllm.drafts(req_ids=names, draft_token_ids=drafts))

    def accepted(self, record: Record, drafts: int) -> int:
        """How many drafts are right: by dice that the request's number and its tokens so far determine."""
        dice = mixed(mixed(DRAFT_DICE, record.number), record.produced) >> (64 - SHARE_BITS)
        each = share = self.case["acceptance_each"]
        accepted = 0
        while accepted < drafts and dice < share:
            accepted, share = accepted + 1, share * each >> SHARE_BITS
        return accepted

    def note(self, record: Record, output: Any) -> None:
        """Write down what one request got."""
        if output.new_token_ids:
            self.prefilling[output.request_id].is_prefilling = False
            record.produced += len(output.new_token_ids)
            record.first_token_ns = self.now_ns if record.first_token_ns is None else record.first_token_ns
        if output.prefill_stats is not None:  # of its first admission; resumptions do not count
            record.cached_tokens = output.prefill_stats.num_local_cached_tokens
        if output.finish_reason is not None:
            record.finish_ns = self.now_ns
            del self.prefilling[output.request_id]

    def result(self, error: str = "") -> dict[str, Any]:
        """The answer."""
        answer: dict[str, Any] = {
            "ok": not error,
            "steps": self.steps,
            "requests": [record.row() for record in self.records.values()],
            "rejected": self.rejected,
            "summary": {
                "steps": len(self.steps),
                "preemptions": self.preemptions,
                "prefix_query_tokens": self.queried,
                "prefix_hit_tokens": self.hit,
                "preempted_query_tokens": self.queried_again,
                "preempted_hit_tokens": self.hit_again,
                "rejected": len(self.rejected),
            },
        }
        if error:
            left = f"{len(self.scheduler.waiting)} waiting and {len(self.scheduler.running)} running"
            answer |= {"error": error, "message": f"after {len(self.steps)} steps: {left}"}
        if self.case.get("blocks"):
            answer["blocks"] = self.tables
        return answer


def answer(vllm: Vllm, case: dict[str, Any]) -> dict[str, Any]:
    """The answer to one case, whatever it is: vLLM's refusals are answers too."""
    try:
        return Run(vllm, case).answer()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return {"ok": False, "error": type(error).__name__, "message": f"{error} at {last.filename}:{last.lineno}: {last.line}"}


def main() -> None:
    """Answer until stdin ends."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="", HF_HUB_OFFLINE="1")
    out = private_stdout()
    vllm = Vllm(sys.argv[1])
    for line in sys.stdin:
        out.write(json.dumps(answer(vllm, json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
