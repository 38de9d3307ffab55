"""How large the next steps may be after one ran out of memory, when they grow again, and whose request is aborted.

Pure: the time and the free memory are arguments.

    a step fails           the next steps hold half the tokens of the one that failed, and no more sequences than tokens
    at SMALLEST_TOKENS     half the sequences as well
    the same one alone     fails ALONE_TRIES times without a token in between: it is aborted, and the size from before
                           the first failure is back
    calm                   steps grow by half; a size that has failed is tried again only when memory has come back, or,
                           where free memory cannot be read, after a pause that doubles with every failed try
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

SMALLEST_TOKENS = 64
ALONE_TRIES = 3
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
    """What a step may hold at most."""

    tokens: int
    sequences: int
    encoder_tokens: int = 0


@dataclass(frozen=True)
class FailedStep:
    """What the step held that ran out of memory."""

    tokens: int
    requests: tuple[str, ...]
    site: str = "unknown"
    encoder_requests: tuple[str, ...] = ()  # one entry a picture, video or sound
    largest_item: int = 0  # encoder tokens of the largest of them


@dataclass(frozen=True)
class Verdict:
    """What follows from a failed step."""

    limits: Limits
    abort: str | None = None  # the request to abort
    is_storm: bool = False  # so many failures that this server should be restarted
    is_over: bool = False  # too many: containment ends and vLLM dies


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
        self._worked: Limits | None = None  # the limits that held before the last growth
        self._too_large: Limits | None = None  # the smallest limits that are known to fail
        self._retry_after_s = RETRY_AFTER_S
        self._retry_at = 0.0
        self._alone: dict[str, int] = {}
        self._small_since: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether steps are as large as at the start."""
        return self.now == self.start

    def is_calm(self, now: float) -> bool:
        """Whether the last failure is long enough ago to call its episode over."""
        return self._last_failure is None or now - self._last_failure > CALM_S

    def is_limping(self, now: float) -> bool:
        """Whether steps have been far smaller than usual for minutes."""
        return self._small_since is not None and now - self._small_since >= LIMP_AFTER_S

    def is_storm(self, now: float) -> bool:
        """Whether there were so many failures lately that a restart is better."""
        return self._storm > 0 and self.failures_lately(now) >= self._storm

    def failures_lately(self, now: float) -> int:
        """Failures in the last STORM_WINDOW_S."""
        while self._failures and now - self._failures[0] > STORM_WINDOW_S:
            self._failures.popleft()
        return len(self._failures)

    def fail(self, step: FailedStep, now: float) -> Verdict:
        """Note a failed step and say what the next ones may hold."""
        if self.is_calm(now):
            self._before = self.now
            self._alone.clear()
        self._last_failure = now
        self._failures.append(now)
        lately = self.failures_lately(now)
        if self._storm > 0 and lately >= 2 * self._storm:
            return Verdict(self.now, is_storm=True, is_over=True)
        culprit = self._culprit(step)
        if culprit is None:
            self._shrink(step, now)
        elif self._alone[culprit] >= ALONE_TRIES:
            # It failed alone, so the others' sizes were not to blame.
            del self._alone[culprit]
            self._set(self._before, now)
            return Verdict(self.now, abort=culprit, is_storm=self.is_storm(now))
        self._changed = now
        return Verdict(self.now, is_storm=self.is_storm(now))

    def _culprit(self, step: FailedStep) -> str | None:
        """The request that failed alone in a step that cannot be made smaller, counted; None where it can."""
        if step.site == "encoder" and step.encoder_requests:
            # An encoder takes whole pictures: the tokens of the step do not matter to it.
            if len(step.encoder_requests) > 1:
                return None
            alone = step.encoder_requests[0]
        elif len(step.requests) == 1 and step.tokens <= self._smallest:
            alone = step.requests[0]
        else:
            return None
        self._alone[alone] = self._alone.get(alone, 0) + 1
        return alone

    def _shrink(self, step: FailedStep, now: float) -> None:
        if step.site == "encoder" and len(step.encoder_requests) > 1:
            self._set(replace(self.now, encoder_tokens=step.largest_item), now)
            return
        tokens = min(step.tokens, self.now.tokens)
        sequences = min(len(step.requests), self.now.sequences)
        worked = self._worked
        failed = replace(self.now, tokens=tokens, sequences=self.now.sequences)
        if tokens <= self._smallest:
            failed = replace(failed, sequences=sequences)
        if self._too_large is None or failed.tokens < self._too_large.tokens or failed.tokens <= self._smallest:
            self._too_large = failed
        if worked is not None and (tokens > worked.tokens or (tokens <= self._smallest and sequences > worked.sequences)):
            # A size that was tried again still does not fit: back to the one that held, and wait longer.
            self._worked = None
            self._retry_after_s = min(RETRY_MOST_S, 2 * self._retry_after_s)
            self._set(worked, now)
        elif tokens <= self._smallest:
            halved = max(self._smallest, self.now.tokens // 2)
            fewer = max(1, min(sequences // 2, self._sequences_for(halved)))
            self._set(replace(self.now, tokens=halved, sequences=fewer), now)
        else:
            tokens = max(self._smallest, tokens // 2)
            self._set(replace(self.now, tokens=tokens, sequences=self._sequences_for(tokens)), now)
        self._retry_at = now + self._retry_after_s

    def progress(self, requests: Iterable[str]) -> None:
        """These requests have sent a token: what they failed at before is behind them."""
        if self._alone:
            for request in requests:
                self._alone.pop(request, None)

    def wants_to_grow(self, now: float) -> bool:
        """Whether it has been calm for long enough to try a larger size; then free memory is worth a look."""
        if self.is_whole:
            return False
        is_few = self.now.sequences < self._sequences_for(self.now.tokens)
        return now - self._changed >= (GROW_SEQUENCES_AFTER_S if is_few else GROW_AFTER_S)

    def grow(self, now: float, *, has_room: bool | None) -> bool:
        """Grow by one step if that is sound; `has_room`: more memory is free than at the failure, None if unknown."""
        if not self.wants_to_grow(now):
            return False
        larger = self._larger()
        if self._has_failed(larger):
            if has_room is False:
                # Looked at again in a while; what failed with this memory would fail again.
                self._changed = now
                return False
            if has_room is None and now < self._retry_at:
                return False
        self._worked = self.now
        self._set(larger, now)
        if self.is_whole:
            self._too_large, self._retry_after_s = None, RETRY_AFTER_S
        return True

    def _larger(self) -> Limits:
        most = self._sequences_for(self.now.tokens)
        if self.now.sequences < most:
            return replace(self.now, sequences=min(most, 2 * self.now.sequences), encoder_tokens=self.start.encoder_tokens)
        tokens = min(self.start.tokens, self.now.tokens * 3 // 2)
        return Limits(tokens, self._sequences_for(tokens), self.start.encoder_tokens)

    def _has_failed(self, limits: Limits) -> bool:
        worst = self._too_large
        return worst is not None and limits.tokens >= worst.tokens and limits.sequences >= worst.sequences

    def _sequences_for(self, tokens: int) -> int:
        """No more sequences than a step can serve, or the last ones would wait for ever."""
        if tokens >= self.start.tokens:
            return self.start.sequences
        return max(1, min(self.start.sequences, tokens // self._per_sequence))

    def _set(self, limits: Limits, now: float) -> None:
        self.now = limits
        self._changed = now
        if limits.tokens >= LIMP_SHARE * self.start.tokens:
            self._small_since = None
        elif self._small_since is None:
            self._small_since = now
