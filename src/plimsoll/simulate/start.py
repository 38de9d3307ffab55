"""Lays out a simulation: from a trace and settings to the arrays that compiled code walks."""

from __future__ import annotations

import math

import numpy as np

from plimsoll.errors import BadInput

from plimsoll.simulate.layout import (  # isort: skip
    ACCEPTANCE, ADAPTER, ALIGNMENT, ARRIVAL, ASYNC, BLOCK_SIZE, BUDGET, BY_PRIORITY, CACHING, CHUNKED, COUNTS, CTX_PS,
    DRAFT_PPM, DRAFT_SLOTS, DROPS_BLOCK, EMBED_PS, ENCODED, ENCODER_FREE, ENCODER_FREEABLE, ENCODER_TOKENS, E_NEXT, E_PREV,
    E_TOKENS, FREE_BLOCKS, FREE_SLOTS, FULL, FULL_BUDGET, FULL_GROUPS, GROUPS, HIT_SLOT, IDS_BEGIN, IDS_END, IDS_TOKENS,
    ITEMS_BEGIN, ITEMS_END, I_ENTRY, I_TOKENS, LIMITS, LINK_FIELDS, LOAD_NS, LOOKAHEAD, LOOKS_AHEAD, MAMBA, MAMBA_ALIGN,
    MAX_LEN, MAX_LORAS, MAX_QUEUED, MAX_QUEUED_TOKENS, MAX_SEQS, NEXT, NUMBER, NUM_BLOCKS, OUTPUT, PAIR_FS, PREFIX_BLOCK, PREV,
    PRIORITY, PROMPT, PROMPT_NS, REJECTED, REJECTED_COUNT, REQUEST_FIELDS, RESERVE_FULL, SEAT_FIELDS, SEAT_FREE_SLOT, SEQ_NS,
    SIMPLE, SLIDING, SLOT, SPECS, SPEC_TOKENS, STAMP_FIELDS, STATUS, TABLE, THRESHOLD, TIE, TOKENS, WATERMARK_BLOCKS, Int32,
    RunState,
)  # fmt: skip
from plimsoll.simulate.pool import chain
from plimsoll.simulate.scheduler import SHARE_BITS
from plimsoll.simulate.settings import LONGEST_STEP_NS, CacheGroup, EncoderLimits, EngineLimits, StepTime, groups_of
from plimsoll.simulate.trace import Flags, Integers, Trace, starts

_KINDS = {"full": FULL, "sliding": SLIDING, "mamba": MAMBA}
MOST_TOKENS = 2**31 - 2  # Of one request: the arrays hold 32-bit numbers
MOST_BLOCKS = 20_000_000  # About a GiB of memory here, and twenty times the blocks of eight of the largest cards
BOUNDS = {  # the least and the most of a limit, and why
    "num_blocks": (2, MOST_BLOCKS, ": one of them is the null block"), "block_size": (1, 1 << 20, ""),
    "max_num_seqs": (1, MOST_TOKENS, ""), "max_num_batched_tokens": (1, 1 << 24, ""), "max_model_len": (1, MOST_TOKENS, ""),
    "long_prefill_token_threshold": (0, MOST_TOKENS, "; 0 is off"),
}  # fmt: skip


def check(settings: EngineLimits) -> None:
    """Raises BadInput for settings with which vLLM would not start or a replay would never end."""
    for name, (least, most, why) in BOUNDS.items():
        if not least <= getattr(settings, name) <= most:
            raise BadInput(
                f"--{name.replace('_', '-')} must lie between {least} and {most}, not {getattr(settings, name)}{why}"
            )
    if not 0 <= settings.watermark < 1:
        raise BadInput(f"--watermark must lie between 0 and 1, not {settings.watermark}")
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise BadInput(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} must be at least --max-num-seqs "
            f"{settings.max_num_seqs}: vLLM does not start otherwise"
        )
    if not settings.chunked_prefill and settings.max_num_batched_tokens < settings.max_model_len:
        raise BadInput(
            f"without chunked prefill --max-num-batched-tokens {settings.max_num_batched_tokens} must be at least "
            f"--max-model-len {settings.max_model_len}: vLLM does not start otherwise"
        )
    slots = settings.speculation.slots if settings.speculation is not None else 0
    if settings.max_num_batched_tokens <= slots:
        raise BadInput(
            f"--max-num-batched-tokens {settings.max_num_batched_tokens} must be above {slots}, the slots of a step that the "
            "drafter takes for each request: vLLM does not start otherwise"
        )
    if settings.speculation is not None and any(group.kind == "mamba" for group in settings.groups):
        raise BadInput("speculative decoding is not replayed for models with Mamba layers")
    if settings.host_cache is not None and (settings.groups or not 1 <= settings.host_cache.blocks <= MOST_BLOCKS):
        raise BadInput(f"the host's memory has 1 to {MOST_BLOCKS} blocks, of a model whose layers keep every token")
    groups = groups_of(settings)
    sizes = {group.block_size for group in groups}
    for group in groups:
        if group.block_size < 1:
            raise BadInput(f"--groups: a block size must be at least 1, not {group.block_size}")
        if group.kind == "sliding" and group.window < 1:
            raise BadInput("--groups: a sliding group needs its window in tokens, at least 1")
    if any(group.kind == "mamba" for group in groups) and settings.prefix_caching:
        if len(sizes) > 1:
            raise BadInput("--groups: with prefix caching, Mamba groups and the others must have the same block size")
        if not settings.chunked_prefill:
            raise BadInput("--groups: prefix caching of Mamba groups needs chunked prefill: vLLM does not start otherwise")
    if len(groups) > 1 and settings.block_size != min(group.block_size for group in settings.groups):
        raise BadInput(f"--groups: --block-size must be their smallest, not {settings.block_size}")
    if len(groups) == 1 and groups[0].kind != "mamba" and sizes != {settings.block_size}:
        raise BadInput(
            f"--groups: the only group has blocks of {groups[0].block_size}, --block-size says {settings.block_size}"
        )


def sliding_cap(group: CacheGroup, settings: EngineLimits) -> int:
    """The most blocks a request ever holds in a sliding group: its window, the tokens under way, one for an uneven start."""
    under_way = settings.max_num_batched_tokens * (2 if settings.async_scheduling else 1)
    return -(-min(group.window - 1 + under_way, settings.max_model_len) // group.block_size) + 1


def check_start(settings: EngineLimits) -> None:
    """Raises BadInput where a request of --max-model-len does not fit; with full attention alone, replay rejects long ones."""
    check(settings)
    groups = groups_of(settings)
    if all(group.kind == "full" for group in groups):
        return
    needed = 0
    for group in groups:
        if group.kind == "sliding":
            needed += sliding_cap(group, settings)
        elif group.kind == "mamba":
            needed += 2 if settings.prefix_caching else 1
        else:
            needed += -(-settings.max_model_len // group.block_size)
    if needed > settings.num_blocks - 1:
        raise BadInput(
            f"one request of --max-model-len {settings.max_model_len} needs {needed} blocks of these groups, and there are "
            f"{settings.num_blocks - 1}: vLLM does not start. Lower it or raise --num-blocks"
        )


def turn_limits(limits: Integers, settings: EngineLimits) -> None:
    """Sets those limits that a running engine can change: plimsoll.inside's knobs."""
    limits[MAX_SEQS] = settings.max_num_seqs
    limits[BUDGET] = settings.max_num_batched_tokens
    limits[THRESHOLD] = settings.long_prefill_token_threshold
    limits[WATERMARK_BLOCKS] = int(settings.watermark * settings.num_blocks)


def _limits(settings: EngineLimits, step_time: StepTime, prefix_block: int, groups: Integers) -> Integers:
    limits = np.zeros(LIMITS + groups.size, dtype=np.int64)
    limits[LIMITS:] = groups.ravel()
    limits[NUM_BLOCKS] = settings.num_blocks
    limits[BLOCK_SIZE] = settings.block_size
    turn_limits(limits, settings)
    limits[FULL_BUDGET] = settings.max_num_batched_tokens
    limits[MAX_LEN] = settings.max_model_len
    limits[CACHING] = settings.prefix_caching
    limits[CHUNKED] = settings.chunked_prefill
    limits[ASYNC] = settings.async_scheduling
    limits[RESERVE_FULL] = settings.reserve_full_isl
    limits[BY_PRIORITY] = settings.policy == "priority"
    limits[SEQ_NS] = step_time.seq_ns
    limits[CTX_PS] = step_time.ctx_ps
    limits[PAIR_FS] = step_time.pair_fs
    limits[PROMPT_NS] = step_time.prompt_ns
    limits[PREFIX_BLOCK] = prefix_block
    limits[GROUPS] = len(groups)
    limits[SPECS] = groups[:, 4].max() + 1
    limits[ALIGNMENT] = math.lcm(*groups[:, 1].tolist())
    limits[MAMBA_ALIGN] = settings.prefix_caching and bool((groups[:, 0] == MAMBA).any())
    limits[FULL_GROUPS] = (groups[:, 0] == FULL).sum()
    limits[MAX_QUEUED], limits[MAX_QUEUED_TOKENS] = (
        -1 if most is None else most for most in (settings.max_num_queued_reqs, settings.max_num_queued_tokens)
    )
    limits[MAX_LORAS] = settings.max_loras or 0
    if (drafted := settings.speculation) is not None:
        limits[SPEC_TOKENS], limits[LOOKAHEAD], limits[DRAFT_SLOTS] = drafted.tokens, drafted.lookahead, drafted.slots
        limits[DROPS_BLOCK], limits[DRAFT_PPM], limits[LOOKS_AHEAD] = (
            drafted.drops_block,
            drafted.draft_ppm,
            drafted.looks_ahead,
        )
        limits[ACCEPTANCE] = round(drafted.each * (1 << SHARE_BITS))
    limits[LOAD_NS] = settings.host_cache.block_ns if settings.host_cache is not None else 0
    said = (
        settings.host_cache,
        settings.speculation,
        settings.max_loras,
        settings.max_num_queued_reqs,
        settings.max_num_queued_tokens,
    )
    limits[SIMPLE] = len(groups) == 1 and groups[0, 0] == FULL and all(one is None for one in said)
    return limits


def too_long(tokens: Integers, settings: EngineLimits) -> Flags:
    """Returns which requests of these tokens, prompt and output, can never run: too long for the model or the whole pool."""
    usable = settings.num_blocks - 1
    full = [group.block_size for group in groups_of(settings) if group.kind == "full"]
    if len(groups_of(settings)) == len(full) == 1:
        return tokens > min(settings.max_model_len, usable * full[0])
    # The last token is never kept. Other groups' blocks come and go: only requests that surely do not fit are refused.
    held = sum((-(-(tokens - 1) // size) for size in full), np.zeros_like(tokens))
    return (tokens > settings.max_model_len) | (held > usable)


def _request_rows(trace: Trace, settings: EngineLimits) -> Int32:
    rows = np.zeros((trace.size, REQUEST_FIELDS), dtype=np.int32)
    total = trace.prompt + trace.output
    if trace.size and int(total.max()) > MOST_TOKENS:
        raise BadInput(f"{trace.name}: a request of {int(total.max())} tokens is longer than this can count")
    rows[:, PROMPT] = np.maximum(1, trace.prompt)
    rows[:, TOKENS] = rows[:, PROMPT]
    rows[:, OUTPUT] = trace.output
    rows[:, SLOT] = -1
    rows[:, STATUS] = np.where(too_long(total, settings), REJECTED, 0)
    if settings.policy == "priority":
        if trace.size and int(np.abs(trace.priority).max()) > MOST_TOKENS:
            raise BadInput(f"{trace.name}: priorities must lie between -{MOST_TOKENS} and {MOST_TOKENS}")
        rows[:, PRIORITY] = trace.priority
        # Equal priority and arrival: vLLM compares the ids as text, and the n-th request is called "n".
        order = sorted(range(trace.size), key=str)
        rows[order, TIE] = np.arange(trace.size, dtype=np.int64)
    return rows


def _links(blocks: int) -> Int32:
    """All blocks but the null block free, in the order of their numbers. Two more rows are the queue's ends."""
    head, tail = blocks, blocks + 1
    links = np.zeros((blocks + 2, LINK_FIELDS), dtype=np.int32)
    if blocks > 1:
        links[1:blocks, PREV], links[1:blocks, NEXT] = np.arange(blocks - 1), np.arange(2, blocks + 1)
        links[head, NEXT], links[1, PREV] = 1, head
        links[tail, PREV], links[blocks - 1, NEXT] = blocks - 1, tail
    return links


def _items(trace: Trace) -> tuple[Integers, Integers, Integers]:
    """The pictures and sounds of all requests, their contents, and where each request's begin.

    They stand one after another at the beginning of the prompt. Two have the same content where the prompts are the same up to
    there, as far as prefix ids say it.
    """
    rows: list[tuple[int, ...]] = []
    contents: dict[tuple[object, ...], int] = {}
    counts = np.fromiter(map(len, trace.images), dtype=np.int64, count=trace.size)
    for request in np.flatnonzero(counts).tolist():
        ids, at = trace.ids_of(request), 0
        for place, tokens in enumerate(trace.images[request]):
            block = at // trace.prefix_block
            content = (ids[: block + 1].tobytes(), at, tokens) if block < len(ids) else (request, place)
            rows.append((at, tokens, contents.setdefault(content, len(contents)), 0, 0))
            at += tokens
    items = np.array(rows, dtype=np.int64).reshape(-1, 5)
    entries = np.zeros((len(contents) + 2, 6), dtype=np.int64)
    entries[items[:, I_ENTRY], E_TOKENS] = items[:, I_TOKENS]
    entries[-2, E_NEXT], entries[-1, E_PREV] = len(contents) + 1, len(contents)
    return items, entries, starts(counts)


def start(
    trace: Trace, settings: EngineLimits, step_time: StepTime, arrival_ns: Integers, *, is_open: bool = False
) -> RunState:
    """A simulation before its first step. `arrival_ns`: the trace's arrivals after any speed-up.

    `is_open`: more requests will come, as many at once and as long as the settings allow.
    """
    check(settings)
    for_one = max(step_time.ctx_ps * settings.max_model_len // 1000, step_time.seq_ns)
    if for_one * settings.max_num_seqs > LONGEST_STEP_NS:
        raise BadInput("a step would take more than a day: lower --seq-ns or --ctx-ps")
    if step_time.pair_fs * 2 * settings.max_num_batched_tokens * settings.max_model_len > 2**63 - 1:
        raise BadInput("a step would take hours: lower --max-num-batched-tokens or --max-model-len")
    try:
        return _laid_out(trace, settings, step_time, arrival_ns, is_open=is_open)
    except MemoryError:
        raise BadInput("too large for this machine's memory: lower --num-blocks, --max-num-seqs or --max-model-len") from None


def _laid_out(trace: Trace, settings: EngineLimits, step_time: StepTime, arrival_ns: Integers, *, is_open: bool) -> RunState:
    # vLLM looks up full attention first: its hits narrow the search for the others.
    kinds = sorted(dict.fromkeys(groups_of(settings)), key=lambda group: group.kind != "full")
    # Kind, block size, window, most blocks of a request at admission (0: no limit), and the number of its kind.
    groups = np.array(
        [
            (_KINDS[group.kind], group.block_size, group.window,
             sliding_cap(group, settings) if group.kind == "sliding" else 0, kinds.index(group))
            for group in groups_of(settings)
        ],
        dtype=np.int64,
    )  # fmt: skip
    requests = _request_rows(trace, settings)
    adapters, numbers = np.unique(np.append(0, trace.adapter), return_inverse=True)
    adapter = numbers[1:]  # from 1 on, 0 for none
    stamps = np.full((trace.size, STAMP_FIELDS), -1, dtype=np.int64)
    stamps[:, ARRIVAL] = arrival_ns
    stamps[:, IDS_BEGIN], stamps[:, IDS_END] = trace.prefix_start[:-1], trace.prefix_start[1:]
    stamps[:, IDS_TOKENS], stamps[:, NUMBER], stamps[:, ADAPTER] = requests[:, PROMPT], np.arange(trace.size), adapter
    chains = np.zeros(len(trace.prefix_ids) if settings.prefix_caching else 0, dtype=np.uint64)
    if len(chains):
        chain(trace.prefix_ids, trace.prefix_start, adapter, chains)
    admitted = requests[:, STATUS] != REJECTED
    longest = int((requests[:, PROMPT] + requests[:, OUTPUT])[admitted].max(initial=1))
    slots = min(settings.max_num_seqs, max(1, trace.size))
    if is_open:
        longest, slots = settings.max_model_len, settings.max_num_seqs
    ahead = settings.speculation.tokens + settings.speculation.lookahead if settings.speculation is not None else 0
    width = -(-(longest + ahead) // int(groups[:, 1].min())) + 2
    counts = np.zeros(COUNTS, dtype=np.int64)
    counts[FREE_BLOCKS] = settings.num_blocks - 1
    counts[FREE_SLOTS] = slots
    counts[REJECTED_COUNT] = trace.size - int(admitted.sum())
    seats = np.zeros((2 * slots + 2, SEAT_FIELDS), dtype=np.int64)
    seats[:slots, SEAT_FREE_SLOT] = np.arange(slots)[::-1]
    # Most rows are never used, and untouched memory is not allocated.
    tables = np.zeros((len(groups), slots + 1, TABLE + width), dtype=np.int32)
    limits = _limits(settings, step_time, trace.prefix_block, groups)
    items, entries, item_start = _items(trace)
    stamps[:, ITEMS_BEGIN], stamps[:, ITEMS_END], stamps[:, ENCODED] = item_start[:-1], item_start[1:], 0
    if len(items):
        said, largest = settings.encoder or EncoderLimits(), int(items[:, I_TOKENS].max())
        limits[ENCODER_TOKENS] = max(said.budget or settings.max_num_batched_tokens, largest)
        counts[ENCODER_FREE] = counts[ENCODER_FREEABLE] = max(said.cache or settings.max_num_batched_tokens, largest)
        limits[EMBED_PS], limits[SIMPLE] = said.embed_ps, False
    limits[HIT_SLOT] = slots
    host_blocks = settings.host_cache.blocks + 1 if settings.host_cache is not None else 0
    return RunState(
        limits=limits,
        counts=counts,
        requests=requests,
        stamps=stamps,
        waiting=np.zeros(trace.size + 1, dtype=np.int32),
        seats=seats,
        tables=tables,
        links=_links(settings.num_blocks),
        keys=np.zeros(settings.num_blocks, dtype=np.uint64),
        chains=chains,
        adapters=np.zeros(len(adapters), dtype=np.int64),
        items=items,
        entries=entries,
        host_links=_links(host_blocks),
        host_keys=np.zeros(host_blocks, dtype=np.uint64),
    )
