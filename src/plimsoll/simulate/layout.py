"""The memory layout of a simulation: plain arrays, so that compiled code can walk them and a run can be stopped anywhere.

    requests   one row for each request
    links      one row for each block: the free queue and the hash buckets are lists through them
    tables     one row of block ids for each running request (its slot), one layer a cache group
    seats      one row for each place in the batch: requests that run or are set aside, and each step's work
    counts     the few numbers that change: requests running and waiting, free blocks, the sums

Few arrays, because each is passed to every function that is not inlined.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

# A row of `requests`: the first ten are looked at in every step.
(
    COMPUTED, TOKENS, PLACEHOLDERS, IN_FLIGHT, PROMPT, OUTPUT, HELD, FILLS, STATUS, STALE,
    SLOT, PRODUCED, PREEMPTIONS, LOST, CACHED, PRIORITY, TIE, BOUNDARY, DRAFTS,
) = range(19)  # fmt: skip
REQUEST_FIELDS = 19
"""COMPUTED..IN_FLIGHT and STALE are vLLM's num_computed_tokens, num_tokens, num_output_placeholders, num_in_flight_tokens and
num_stale_output_tokens. HELD: tokens its table has room for. FILLS: how many tokens fill its next block. LOST: tokens computed
when last preempted. CACHED: hit tokens of the first admission. TIE: order among requests of equal priority and arrival.
BOUNDARY: vLLM's shared_prefix_boundary. DRAFTS: tokens that a drafter guessed and the next step verifies."""

NOT_ARRIVED, WAITING, RUNNING, PREEMPTED, FINISHED, REJECTED, REFUSED = range(7)
# REJECTED: too long for the engine. REFUSED: it came when the queue was full.

# A row of `stamps`. IDS: the begin and end of a request's prefix ids, and the number of its tokens that they cover. NUMBER
# identifies its own content; rows are used again, numbers are not. ADAPTER: its LoRA adapter, 0 for none. ASIDE: the request
# set aside before it. ITEMS: the begin and end of its rows in `items`; ENCODED: their tokens that the step encodes. LAST_TOKEN
# and TOLD, the number of its preemptions that are already counted, are written in open runs alone.
(
    ARRIVAL, FIRST_SCHED, FIRST_TOKEN, FINISH, IDS_BEGIN, IDS_END, IDS_TOKENS, NUMBER, ADAPTER, ASIDE, ITEMS_BEGIN, ITEMS_END,
    ENCODED, LAST_TOKEN, TOLD,
) = range(15)  # fmt: skip
STAMP_FIELDS = 15

# A row of `links`; FIRST and LAST are those of the bucket with the row's number. FRESH_IN: the pass in which a Mamba state
# appeared; nobody else can start from it before the next.
PREV, NEXT, BUCKET_PREV, BUCKET_NEXT, REFS, BUCKET_FIRST, BUCKET_LAST, FRESH_IN = range(8)
LINK_FIELDS = 8

# A row of `tables`: four numbers about the table, then the blocks.
LENGTH, HASHED, LAST_STATE, RETIRED = range(4)
TABLE = 4
"""HASHED: how many blocks of it are in the prefix cache (vLLM's num_cached_block). LAST_STATE, RETIRED: of a Mamba group, the
place of the last state's block (-1: none) and how many places are behind. The last slot holds the hits of the last look-up."""

# A row of `seats`; a batch has three columns, and there are two batches. PRODUCES: 0 for a chunk of a prompt, 1 and the number
# of drafts that the step verifies, or less than 0 for drafts that nobody made and that only fill up a graph.
SEAT_RUNNING, SEAT_FREE_SLOT, SEAT_BATCH = range(3)
B_HOW_MANY, B_PRODUCES = 1, 2
SEAT_FIELDS = 8

# `limits`: the numbers that do not change in a run.
(
    NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, BUDGET, MAX_LEN, CACHING, CHUNKED, THRESHOLD, ASYNC, WATERMARK_BLOCKS, RESERVE_FULL,
    BY_PRIORITY, SEQ_NS, CTX_PS, PREFIX_BLOCK, GROUPS, SPECS, ALIGNMENT, MAMBA_ALIGN, FULL_GROUPS, SIMPLE, HIT_SLOT, PAIR_FS,
    PROMPT_NS, FULL_BUDGET, SPEC_TOKENS, LOOKAHEAD, DRAFT_SLOTS, DROPS_BLOCK, ACCEPTANCE, DRAFT_PPM, MAX_LORAS, MAX_QUEUED,
    MAX_QUEUED_TOKENS, ENCODER_TOKENS, LOOKS_AHEAD, EMBED_PS, LOAD_NS,
) = range(38)  # fmt: skip
# The groups come after them: limits[G_BLOCK + G_FIELDS * group].
G_FIELDS = 5
LIMITS = 38
G_KIND, G_BLOCK, G_WINDOW, G_CAP, G_SPEC = range(LIMITS, LIMITS + G_FIELDS)

# `counts`: the numbers that do.
(
    FREE_BLOCKS, RUNNING_COUNT, WAITING_COUNT, WAITING_HEAD, FREE_SLOTS, NOW, NEXT_ARRIVAL, DEVICE_FREE, IN_FLIGHT_BATCHES,
    OLDEST_BATCH, TABLE_BLOCKS, FULL_SLOTS, COMPUTED_RUNNING, STEPS, BUSY_NS, SCHEDULED_TOKENS, PREEMPTION_COUNT, RECOMPUTED,
    QUERIES, HITS, RESUMED_QUERIES, RESUMED_HITS, PEAK_BLOCKS, PEAK_RUNNING, PEAK_WAITING, LOG_ROWS, DONE, STUCK,
    REJECTED_COUNT, FINISHED_COUNT, PREEMPTED_COUNT, PASS, STEP_BUDGET, REFUSED_COUNT, DRAFTED, ACCEPTED, ENCODER_FREE,
    ENCODER_FREEABLE, ENCODER_BUDGET, ENCODER_LOOKS, ENCODER_COUNT, HOST_HITS, BATCHES,
) = range(43)  # fmt: skip
# The decisions of schedule(), by batch: counts[BATCHES + batch * BATCH_FIELDS + field].
B_REQUESTS, B_TOKENS, B_NEW, B_RESUMED, B_PREEMPTED, B_CONTEXT, B_PAIRS, B_END, B_ENCODED, B_LOADED = range(10)
BATCH_FIELDS = 10
COUNTS = BATCHES + 2 * BATCH_FIELDS

FULL, SLIDING, MAMBA = range(3)

# A row of `items`; MARK: the last look that wants it encoded, negative where the same content comes twice.
I_START, I_TOKENS, I_ENTRY, I_HELD, I_MARK = range(5)
# A row of `entries`; the last two are the ends of the list of contents that nobody needs.
E_TOKENS, E_CACHED, E_HOLDERS, E_PREV, E_NEXT, E_MARK = range(6)

NO_KEY = np.uint64(0)
NEVER_FILLS = 2**31 - 1


class RunState(NamedTuple):
    """A simulation between two steps."""

    limits: Int64
    counts: Int64
    requests: Int32
    stamps: Int64
    waiting: Int32  # A ring for first come, first served; a heap for priorities
    seats: Int64
    tables: Int32  # [group, slot, place]
    links: Int32
    keys: UInt64  # The content key of each block that can be hit
    chains: UInt64  # For each prefix id, a digest of it and all before it in its request
    adapters: Int64  # By LoRA adapter, the last pass in which a step had it
    items: Int64  # Pictures and sounds
    entries: Int64  # Their contents
    host_links: Int32  # As `links`, of the blocks in the host's memory: all are free, those used longest ago first
    host_keys: UInt64
