"""Small random traces with small random engines, for a comparison of two schedulers step by step.

They look for trouble: pools that hold little more than the longest request, many equal stamps and priorities, prompts that end
on a block's edge, beginnings shared in every way. What a real server refuses to start with is left out.
"""

from __future__ import annotations

import math
import random
from typing import Any, Literal, NamedTuple

from plimsoll.simulate.scheduler import SHARE_BITS
from plimsoll.simulate.settings import CacheGroup, EncoderLimits, EngineLimits, Speculation, StepTime
from plimsoll.simulate.trace import Trace, make_trace

BLOCK_SIZES = (8, 16, 16, 16, 32, 64, 128, 256)
PREFIX_BLOCKS = (1, 8, 16, 16, 32, 64, 512)
MOST_TOKENS_OUT = 2000  # over all requests of a case; each costs a step at worst
MOST_CHUNKS = 400
MOST_STEPS = 20_000
"""Far more than a case needs. In one of a thousand vLLM goes round in circles, requests preempting each other for ever."""
STATE_BLOCKS = 3
"""A Mamba group holds the state, the one before it, and one more while two batches are in flight."""


class Asked(NamedTuple):
    """One request."""

    arrival_ns: int
    prompt: int
    output: int
    priority: int = 0
    ids: tuple[int, ...] = ()
    adapter: int = 0
    images: tuple[int, ...] = ()


class Case(NamedTuple):
    """What is asked of both schedulers."""

    requests: tuple[Asked, ...]
    prefix_block: int
    settings: EngineLimits
    step_time: StepTime
    turns: tuple[tuple[int, dict[str, float]], ...] = ()  # knobs, from a step on

    def trace(self) -> Trace:
        """The requests as a trace."""
        arrivals, prompts, outputs, priorities, ids, adapters, images = zip(*self.requests, strict=True)
        rows = [list(row) for row in ids]
        return make_trace("random", arrivals, prompts, outputs, priorities, rows, self.prefix_block, adapters, images)

    def turned(self) -> list[tuple[int, EngineLimits]]:
        """The limits that hold from a step on, by the knobs that were turned there."""
        fields = {
            "max-num-seqs": "max_num_seqs", "max-num-batched-tokens": "max_num_batched_tokens", "kv-headroom": "watermark",
            "long-prefill-token-threshold": "long_prefill_token_threshold",
        }  # fmt: skip
        turned: list[tuple[int, EngineLimits]] = []
        for step, values in self.turns:
            changed: dict[str, Any] = {fields[name]: value for name, value in values.items()}
            turned.append((step, self.settings._replace(**changed)))
        return turned

    def as_json(self, *, blocks: bool = False) -> dict[str, Any]:
        """The case as `SchedulerProcess.run` takes it; with `blocks` the answer tells every block table of every step."""
        settings, drafted = self.settings.named, self.settings.speculation
        cost = self.step_time
        return {
            "requests": [asked._asdict() for asked in self.requests],
            "prefix_block": self.prefix_block,
            "settings": settings,
            "step_time": {
                "base_ns": cost.base_ns,
                "token_ns": cost.token_ns,
                "seq_ns": cost.seq_ns,
                "ctx_ps": cost.ctx_ps,
            },
            "blocks": blocks,
            "turns": self.turns,
            "acceptance_each": 0 if drafted is None else round(drafted.each * (1 << SHARE_BITS)),
            "most_steps": MOST_STEPS,
        }


def random_case(rng: random.Random) -> Case:
    """A case in which something can always be scheduled: every request fits into the pool alone, or is refused at once."""
    block_size = rng.choice(BLOCK_SIZES)
    prefix_block = rng.choice(PREFIX_BLOCKS)
    lengths = random_lengths(rng, block_size)
    prompts = random_prefixes(rng, [prompt for prompt, _ in lengths], prefix_block)
    arrivals = random_arrivals(rng, len(lengths))
    levels = rng.choice((1, 2, 3, 3, 5))
    requests = tuple(
        Asked(arrival, prompt, output, rng.randrange(-1, levels - 1), ids)
        for arrival, (_, output), (prompt, ids) in zip(arrivals, lengths, prompts, strict=True)
    )
    return Case(requests, prefix_block, random_settings(rng, block_size, requests), random_step_time(rng))


def with_more(case: Case, rng: random.Random) -> Case:
    """The same case with speculative decoding, adapters or limits of the queue, or with some of them."""
    settings, requests = case.settings, case.requests
    kinds = {group.kind for group in settings.groups}
    wanted = rng.sample(("speculation", "adapters", "requests", "tokens", "pictures", "pictures"), rng.choice((1, 1, 2, 4)))
    if "speculation" in wanted and "mamba" not in kinds and settings.long_prefill_token_threshold == 0:
        settings = settings._replace(speculation=random_speculation(rng))
    if "adapters" in wanted:
        few = rng.randint(1, 6)
        settings = settings._replace(max_loras=rng.randint(1, 4))
        requests = tuple(asked._replace(adapter=rng.randint(0, few)) for asked in requests)
    if "requests" in wanted:
        settings = settings._replace(max_num_queued_reqs=rng.randint(1, 2 * settings.max_num_seqs))
    if "tokens" in wanted:
        settings = settings._replace(max_num_queued_tokens=rng.randint(1, 2 * settings.max_model_len))
    if "pictures" in wanted:
        settings, requests = with_pictures(settings, requests, rng)
    drafted = settings.speculation
    if drafted is not None:
        # A step has room for one request at least, the pool for the longest, whose slots ahead end at max_model_len, too.
        least = 1 + drafted.tokens + drafted.slots
        settings = settings._replace(
            max_num_batched_tokens=max(settings.max_num_batched_tokens, least) + drafted.slots * settings.max_num_seqs,
            num_blocks=max(settings.num_blocks, 1 + blocks_alone(settings, settings.max_model_len)),
        )
    return case._replace(settings=settings, requests=requests)


def with_pictures(
    settings: EngineLimits, requests: tuple[Asked, ...], rng: random.Random
) -> tuple[EngineLimits, tuple[Asked, ...]]:
    """Pictures at the beginning of some prompts, and an encoder with hardly more room than the largest of them needs."""
    sizes = [rng.randint(1, rng.choice((4, 16, 64, 200))) for _ in range(3)]
    given = []
    for asked in requests:
        images: list[int] = []
        while rng.random() < 0.5 and sum(images) + max(sizes) <= asked.prompt and len(images) < 4:
            images.append(rng.choice(sizes))
        given.append(asked._replace(images=tuple(images)))
    largest = max((size for asked in given for size in asked.images), default=1)
    # A drafter reads one token ahead: with room for one picture alone, two side by side would wait for each other in vLLM, too.
    cache = largest * rng.choice((1 if settings.speculation is None else 2, 2, 3, 10)) + rng.choice((0, 1))
    encoder = EncoderLimits(largest * rng.choice((1, 1, 2, 5)), cache, rng.choice((0, 70_000)))
    return settings._replace(encoder=encoder), tuple(given)


def random_speculation(rng: random.Random) -> Speculation:
    """A drafter of any kind: lookahead, slots of the budget and the dropped block as vLLM's methods have them."""
    tokens = rng.choice((1, 1, 2, 3, 5, 7))
    lookahead, slots, drops = rng.choice(
        ((0, 0, False), (tokens, 0, True), (tokens, 0, False), (tokens, 1, False), (tokens + 1, tokens, True))
    )
    looks_ahead = int(lookahead > 0 and (slots, drops) != (1, False))
    acceptance, cost = rng.choice((0.0, 0.2, 0.5, 0.8, 1.0)), rng.choice((0, 0, 40_000))
    return Speculation(tokens, acceptance, lookahead, slots, drops, looks_ahead, cost)


def turned_at_random(case: Case, rng: random.Random) -> Case:
    """The same case with knobs that are turned, let go and turned again."""
    settings, step, turns = case.settings, 0, []
    has_states = settings.prefix_caching and any(group.kind == "mamba" for group in settings.groups)
    lowest = min(settings.block_size if has_states else 1, settings.max_num_batched_tokens)
    for _ in range(rng.randint(1, 30)):
        step += rng.choice((1, 1, 2, 5, 20))
        values: dict[str, float] = {"max-num-seqs": rng.randint(1, settings.max_num_seqs)}
        values["kv-headroom"] = round(rng.uniform(settings.watermark, max(settings.watermark, 0.5)), 3)
        if settings.chunked_prefill:
            values["max-num-batched-tokens"] = rng.randint(lowest, settings.max_num_batched_tokens)
            most = settings.long_prefill_token_threshold or settings.max_num_batched_tokens
            values["long-prefill-token-threshold"] = rng.randint(min(lowest, most), most)
        turns.append((step, {name: values[name] for name in rng.sample(sorted(values), rng.randint(0, len(values)))}))
    return case._replace(turns=tuple(turns))


def random_lengths(rng: random.Random, block_size: int) -> list[tuple[int, int]]:
    """Prompts and outputs; many prompts end on a block's edge or beside it, some outputs are one token."""
    count = rng.randint(10, rng.choice((20, 40, 60)))
    most_prompt = rng.choice((2, 4, 8, 16)) * min(block_size, 64)
    most_output = min(rng.choice((1, 10, 50, 150, 300)), 2 * MOST_TOKENS_OUT // count)
    lengths = []
    for _ in range(count):
        prompt = rng.randint(1, most_prompt)
        if rng.random() < 0.4:
            prompt = max(1, -(-prompt // block_size) * block_size + rng.choice((-1, 0, 0, 1)))
        output = 1 if rng.random() < 0.15 else rng.randint(1, most_output)
        lengths.append((prompt, output))
    return lengths


def random_settings(rng: random.Random, block_size: int, requests: tuple[Asked, ...]) -> EngineLimits:
    """An engine for these requests, with as little memory as makes it suffer."""
    longest = max(asked.prompt + asked.output for asked in requests)
    smallest = sum(asked.prompt for asked in requests) // MOST_CHUNKS
    budget = max(rng.choice((16, 24, 40, 64, 100, 256, 512, 1000, 2048)), smallest)
    chunked = rng.random() < 0.85
    if not chunked:  # the whole of a request must fit into one step, also when it comes back with what it has generated
        budget = longest + rng.choice((0, 1, 100))
    room = longest if rng.random() < 0.8 else max(2, longest * 3 // 4)  # sometimes too short for the longest
    max_model_len = max(room, 16) + rng.choice((0, 0, 1, 100))
    settings = EngineLimits(
        block_size=block_size,
        max_num_seqs=min(rng.choice((1, 2, 3, 4, 8, 16, 32)), budget),
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        prefix_caching=rng.random() < 0.85,
        chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice((4, 16, 33, 100)) if rng.random() < 0.2 else 0,
        async_scheduling=rng.random() < 0.5,
        watermark=rng.choice((0.01, 0.05, 0.2, 0.5)) if rng.random() < 0.2 else 0.0,
        reserve_full_isl=rng.random() < 0.75,
        policy="priority" if rng.random() < 1 / 3 else "fcfs",
    )
    if settings.long_prefill_token_threshold > max_model_len:
        settings = settings._replace(long_prefill_token_threshold=0)
    if rng.random() < 0.4:
        settings = with_groups(rng, settings)
    return settings._replace(num_blocks=1 + random_pool(rng, settings, longest))


def random_pool(rng: random.Random, settings: EngineLimits, longest: int) -> int:
    """Usable blocks: from just enough for the longest request to a few times that."""
    alone = blocks_alone(settings, min(longest, settings.max_model_len))
    if not settings.groups and rng.random() < 0.1:
        return max(1, alone * 2 // 3)  # some requests are refused then, which only one full group can do
    return math.ceil(alone * rng.choice((1, 1.2, 1.5, 2, 2, 2.5, 3, 4))) + rng.choice((0, 0, 1, 2))


def blocks_alone(settings: EngineLimits, tokens: int) -> int:
    """Blocks that are surely enough for one request of so many tokens."""
    flying = settings.max_num_batched_tokens * (2 if settings.async_scheduling else 1)
    total = 0
    for group in settings.groups or (CacheGroup("full", settings.block_size),):
        whole = -(-tokens // group.block_size)
        if group.kind == "sliding":
            kept = min(group.window - 1 + flying, settings.max_model_len)
            whole = min(whole, -(-kept // group.block_size) + 1)
        elif group.kind == "mamba":
            whole = STATE_BLOCKS if settings.prefix_caching else 1
        total += whole
    return total


Shape = Literal["full+sliding", "sliding", "full+mamba", "full+sliding+mamba", "mamba", "full+full"]
SHAPES: tuple[Shape, ...] = (
    "full+sliding", "full+sliding", "full+sliding", "sliding", "sliding", "full+mamba", "full+mamba", "full+mamba",
    "full+sliding+mamba", "mamba", "full+full",
)  # fmt: skip


def with_groups(rng: random.Random, settings: EngineLimits) -> EngineLimits:
    """The same engine for a model whose layers do not all keep the whole context."""
    size = settings.block_size
    shape = rng.choice(SHAPES)
    groups: list[CacheGroup] = []
    if "full" in shape:
        groups += [CacheGroup("full", size)] * (2 if shape == "full+full" else 1)
    if "sliding" in shape:
        other = size
        if shape == "full+sliding" and rng.random() < 0.3:  # one kind's blocks hold several times the tokens of the other's
            larger = size * rng.choice((2, 4))
            other, groups = rng.choice(((larger, groups), (size, [CacheGroup("full", larger)])))
        windows = [random_window(rng, size, settings.max_model_len)]
        windows += [rng.choice((windows[0], random_window(rng, size, settings.max_model_len)))] * rng.choice((0, 0, 1, 2))
        groups += [CacheGroup("sliding", other, window) for window in windows]
    if "mamba" in shape:
        # vLLM itself: states are aligned to blocks exactly when there is prefix caching, which then needs chunked prefill;
        # without it one block holds the only state.
        settings = settings._replace(prefix_caching=settings.prefix_caching and settings.chunked_prefill)
        states = CacheGroup("mamba", size if settings.prefix_caching else settings.max_model_len)
        groups += [states] * rng.choice((1, 1, 2, 3))
    if rng.random() < 0.3:
        rng.shuffle(groups)
    smallest = min(group.block_size for group in groups)
    return settings._replace(groups=tuple(groups), block_size=smallest)


def random_window(rng: random.Random, block_size: int, max_model_len: int) -> int:
    """Smaller than a block, of a few blocks with or without one token more, or larger than any prompt."""
    some = rng.choice((1, 2, 3, 5)) * block_size + rng.choice((-1, 0, 0, 1))
    return rng.choice((max(1, block_size // 2), some, some, some, max_model_len + 10))


def random_prefixes(rng: random.Random, prompts: list[int], prefix_block: int) -> list[tuple[int, tuple[int, ...]]]:
    """A prompt length and prefix ids for each request; a repeated prompt takes the length of the one it repeats."""
    shares = rng.random() < 0.8
    fresh = iter(range(100, 1_000_000))
    few = rng.random() < 0.3  # ids of so small an alphabet that prompts meet and part everywhere
    longest = max(prompts)
    families = [[next(fresh) for _ in range(-(-longest // prefix_block))] for _ in range(rng.randint(1, 4))]
    rows: list[tuple[int, tuple[int, ...]]] = []
    for prompt in prompts:
        needed = -(-prompt // prefix_block)
        earlier = [row for row in rows if row[1]]
        chance = rng.random()
        if not shares or chance < 0.1:
            rows.append((prompt, ()))
        elif few:
            rows.append((prompt, tuple(rng.randint(1, 2) for _ in range(needed))))
        elif earlier and chance < 0.3:
            rows.append(rng.choice(earlier))
        else:
            # As the next turn of a conversation, or with a family's first ids and then its own.
            stem = list(rng.choice(earlier)[1]) if earlier and chance < 0.55 else rng.choice(families)
            stem = stem[: rng.randint(0, needed)] if rng.random() < 0.5 else stem[:needed]
            rows.append((prompt, (*stem, *(next(fresh) for _ in range(needed - len(stem))))))
    return rows


def random_arrivals(rng: random.Random, count: int) -> list[int]:
    """Stamps in order: all at once, in bursts of equal ones, or spread."""
    kind = rng.choice(("once", "bursts", "spread"))
    gap_ns = rng.choice((1000, 100_000, 10_000_000, 100_000_000))
    now_ns = 0
    stamps = []
    for _ in range(count):
        stamps.append(now_ns)
        if kind == "spread" or (kind == "bursts" and rng.random() < 0.2):
            now_ns += rng.randint(0, 2 * gap_ns)
    return stamps


def random_step_time(rng: random.Random) -> StepTime:
    """Constants from none at all to the usual ones; time always goes on."""
    return StepTime(
        base_ns=rng.choice((1, 1000, 6_000_000, rng.randint(1, 10_000_000))),
        token_ns=rng.choice((0, 7, 20_000)),
        seq_ns=rng.choice((0, 3, 10_000)),
        ctx_ps=rng.choice((0, 1, 999, 40_000)),
    )
