"""Decides how large steps may be after one ran out of memory, when they grow again, and which request is aborted.

Pure: the time and the free memory are arguments.

    a step fails        the next steps hold half the tokens of the one that failed, and no more sequences than tokens
    a small step fails  half of its suspects: requests that have sent no token since the trouble began
    one suspect         runs first and alone. If it fails ALONE_TRIES times, it is aborted and the earlier size restored.
                        If it sends a token, there is no culprit: memory is short for so many sequences
    calm                steps grow by half; a size that has failed is tried again only when memory has come back, or,
                        where free memory cannot be read, after a pause that doubles with every failed try
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

SMALLEST_TOKENS = 64
ALONE_TRIES = 3
PAUSES_S = (0.0, 0.1, 0.5)  # before a try alone: a neighbour may need the memory for a moment only
CALM_S = 5.0  # an episode is over after this long without a failure
GROW_AFTER_S = 10.0
GROW_SEQUENCES_AFTER_S = 1.0
RETRY_AFTER_S = 20.0
RETRY_MOST_S = 960.0
STORM_WINDOW_S = 600.0
LIMP_SHARE = 0.25
LIMP_AFTER_S = 300.0


@dataclass(frozen=True)
class Limits:
    """The largest step that is allowed."""

    tokens: int
    sequences: int
    encoder_tokens: int = 0


@dataclass(frozen=True)
class OutOfMemoryStep:
    """The contents of the step that ran out of memory."""

    tokens: int
    requests: tuple[str, ...]
    site: str = "unknown"
    encoder_requests: tuple[str, ...] = ()  # one entry for each picture, video or sound
    largest_item: int = 0  # encoder tokens of the largest of them


@dataclass(frozen=True)
class ShrinkVerdict:
    """The consequences of a failed step, beside the limits of the next ones."""

    abort: str | None = None  # the request to abort
    first: str | None = None  # the request to run before all others
    pause_s: float = 0.0
    is_over: bool = False  # too many failures: containment ends and vLLM dies


class Sizes:
    """The size of steps of one engine, from its start-up flags down and back."""

    def __init__(self, start: Limits, tokens_per_sequence: int = 1, smallest: int = 0, storm: int = 30) -> None:
        self.start = start
        self.now = start
        self._per_sequence = max(1, tokens_per_sequence)
        # A Mamba block, or one sequence with its draft, must fit into a step.
        self._smallest = min(start.tokens, max(SMALLEST_TOKENS, smallest, self._per_sequence))
        self._storm = storm
        self._failures: deque[float] = deque()
        self._last_failure: float | None = None
        self._changed = 0.0
        self._before = start  # the limits before this episode
        self._worked: Limits | None = None  # the limits that worked before the last growth
        self._too_large: Limits | None = None  # the smallest limits that are known to fail
        self._retry_after_s = RETRY_AFTER_S
        self._retry_at = 0.0
        self._cleared: set[str] = set()  # requests that have sent a token in this episode
        self._alone: dict[str, int] = {}  # how often each failed alone
        self.on_trial: str | None = None  # the request that runs alone to see whether it is to blame
        self._is_searching = False  # one request may be to blame: sequences may grow towards it
        self._has_progress = False  # a token was sent since the last change
        self._small_since: float | None = None

    @property
    def is_whole(self) -> bool:
        """True if steps are as large as at the start."""
        return self.now == self.start

    def is_calm(self, now: float) -> bool:
        """True if the last failure is so long ago (CALM_S) that its episode is over."""
        return self._last_failure is None or now - self._last_failure > CALM_S

    def is_limping(self, now: float) -> bool:
        """True if steps have been smaller than LIMP_SHARE of the start's for LIMP_AFTER_S."""
        return self._small_since is not None and now - self._small_since >= LIMP_AFTER_S

    def is_storm(self, now: float) -> bool:
        """True if there were so many failures lately that a restart is better."""
        return self._storm > 0 and self.failures_lately(now) >= self._storm

    def failures_lately(self, now: float) -> int:
        """Returns the number of failures in the last STORM_WINDOW_S."""
        while self._failures and now - self._failures[0] > STORM_WINDOW_S:
            self._failures.popleft()
        return len(self._failures)

    # A failure

    def fail(self, step: OutOfMemoryStep, now: float) -> ShrinkVerdict:
        """Notes a failed step, sets `self.now` for the next ones, and returns the other consequences."""
        if self.is_calm(now):
            self._before, self.on_trial, self._is_searching = self.now, None, False
            self._cleared.clear()
        self._last_failure = now
        self._failures.append(now)
        if self._storm > 0 and self.failures_lately(now) >= 2 * self._storm:
            return ShrinkVerdict(is_over=True)
        # Did one fail alone in a step that cannot be made smaller? An encoder takes whole pictures, whatever the tokens.
        is_encoder = step.site == "encoder" and bool(step.encoder_requests)
        suspects = step.encoder_requests if is_encoder else step.requests
        is_smallest = is_encoder or step.tokens <= self._smallest
        alone = suspects[0] if len(suspects) == 1 and is_smallest else None
        if alone is not None:
            self._alone[alone] = tries = self._alone.get(alone, 0) + 1
            if tries < ALONE_TRIES:
                self._changed = now
                return ShrinkVerdict(first=alone, pause_s=PAUSES_S[tries])
            # It failed alone, so the others' sizes were not to blame.
            del self._alone[alone]
            self.on_trial, self._is_searching, self._too_large, self._worked = None, False, None, None
            self._set(self._before, now)
            return ShrinkVerdict(abort=alone)
        self._shrink(step, now)
        return ShrinkVerdict(first=self.on_trial)

    def _shrink(self, step: OutOfMemoryStep, now: float) -> None:
        tokens = min(step.tokens, self.now.tokens)
        if step.site == "encoder" and len(step.encoder_requests) > 1:
            self._set(replace(self.now, encoder_tokens=step.largest_item), now)
        elif tokens <= self._smallest:
            self._shrink_sequences(step, now)
        else:
            self._note_too_large(replace(self.now, tokens=tokens))
            worked = self._worked
            if worked is not None and tokens > worked.tokens:
                self._go_back_to(worked, now)
            else:
                halved = max(self._smallest, tokens // 2)
                fewer = min(self.now.sequences, self._sequences_for(halved))
                self._set(replace(self.now, tokens=halved, sequences=fewer), now)
        self._retry_at = now + self._retry_after_s

    def _shrink_sequences(self, step: OutOfMemoryStep, now: float) -> None:
        """Reduces the sequences after a small step failed, so that a request that is to blame is soon alone."""
        held = min(len(step.requests), self.now.sequences)
        suspects = [request for request in step.requests if request not in self._cleared]
        self._note_too_large(replace(self.now, sequences=held))
        halved = max(self._smallest, self.now.tokens // 2)
        if len(suspects) == 1 and self._is_searching:
            self.on_trial = suspects[0]
            self._worked = replace(self.now, tokens=halved, sequences=max(1, held - 1))
            self._set(replace(self.now, tokens=halved, sequences=1), now)
            return
        self._is_searching = bool(suspects)
        fewer = len(step.requests) - len(suspects) + len(suspects) // 2
        fewer = max(1, min(held - 1 if held > 1 else 1, fewer, self._sequences_for(halved)))
        if self._worked is not None and not suspects and fewer > self._worked.sequences:
            self._go_back_to(self._worked, now)
        else:
            self._set(replace(self.now, tokens=halved, sequences=fewer), now)

    def _go_back_to(self, worked: Limits, now: float) -> None:
        """Returns to the size that worked, because a larger one failed again, and doubles the wait before the next try."""
        self._worked = None
        self._retry_after_s = min(RETRY_MOST_S, 2 * self._retry_after_s)
        self._set(worked, now)

    def _note_too_large(self, failed: Limits) -> None:
        worst = self._too_large
        if worst is None or (failed.tokens, failed.sequences) < (worst.tokens, worst.sequences):
            self._too_large = failed

    # Afterwards

    def progress(self, requests: Iterable[str]) -> None:
        """Notes that these requests have sent a token: their earlier failures no longer count."""
        if self.is_whole and not self._alone:
            return
        for request in requests:
            self._has_progress = True
            self._cleared.add(request)
            self._alone.pop(request, None)
            if self.on_trial is not None:
                self.end_trial()  # it can run, or it was not alone

    def end_trial(self) -> None:
        """Ends the trial: its request can run, has left or cannot run first, so memory is short for that many together."""
        self.on_trial, self._is_searching = None, False
        if self._worked is not None:
            self.now, self._worked = self._worked, None

    def keep_only(self, living: Collection[str]) -> None:
        """Forgets requests that have ended."""
        self._cleared.intersection_update(living)
        self._alone = {request: tries for request, tries in self._alone.items() if request in living}
        if self.on_trial is not None and self.on_trial not in living:
            self.end_trial()

    def wants_to_grow(self, now: float) -> bool:
        """True if steps were calm for long enough to try a larger size; then the caller looks at the free memory."""
        if self.is_whole or self.on_trial is not None:
            return False
        if self._has_progress and self.now.sequences < self._sequences_for(self.now.tokens):
            return now - self._changed >= GROW_SEQUENCES_AFTER_S
        return now - self._changed >= GROW_AFTER_S

    def grow(self, now: float, *, has_room: bool | None) -> bool:
        """Grows by one step if that is safe; `has_room`: more memory is free than at the failure, None if unknown."""
        if not self.wants_to_grow(now):
            return False
        most = self._sequences_for(self.now.tokens)
        if self.now.sequences < most:
            larger = replace(self.now, sequences=min(most, 2 * self.now.sequences), encoder_tokens=self.start.encoder_tokens)
        else:
            tokens = min(self.start.tokens, self.now.tokens * 3 // 2)
            larger = Limits(tokens, self._sequences_for(tokens), self.start.encoder_tokens)
        worst = self._too_large
        has_failed = worst is not None and larger.tokens >= worst.tokens and larger.sequences >= worst.sequences
        is_search = self._is_searching and larger.tokens == self.now.tokens
        if has_failed and not is_search:
            if has_room is False:
                # Look again later: the same size would fail again with this memory.
                self._changed = now
                return False
            if has_room is None and now < self._retry_at:
                return False
        self._worked = self.now
        self._set(larger, now)
        if self.is_whole:
            self._too_large, self._retry_after_s, self._is_searching = None, RETRY_AFTER_S, False
        return True

    def _sequences_for(self, tokens: int) -> int:
        """Returns how many sequences a step of so many tokens can serve; any more would wait for ever."""
        if tokens >= self.start.tokens:
            return self.start.sequences
        return max(1, min(self.start.sequences, tokens // self._per_sequence))

    def _set(self, limits: Limits, now: float) -> None:
        self.now = limits
        self._changed, self._has_progress = now, False
        share = min(limits.tokens / self.start.tokens, limits.sequences / self.start.sequences)
        if share >= LIMP_SHARE:
            self._small_since = None
        elif self._small_since is None:
            self._small_since = now
