"""What makes a contained failure impossible, by the site at which the step ran out of memory; shared by doctor and guard."""

from __future__ import annotations

from collections.abc import Iterator

from plimsoll.domain.finding import Remedy

TITLE = "steps ran out of GPU memory, and the server survived them"
LEAST_TOKENS = 64  # a step of fewer serves nobody: a limit that low is no setting
ROOM = Remedy(
    "lower --gpu-memory-utilization by what was missing, at the next restart",
    "costs as much KV cache and nothing else", "--gpu-memory-utilization",
)  # fmt: skip
NEIGHBOUR = Remedy(
    "move the other process to another GPU, or bound its memory",
    "vLLM keeps no reserve for neighbours: what they take is missing here",
)
CERTIFY = Remedy(
    "plimsoll plan --certify --table FILE -- vllm serve ..., then PLIMSOLL_ADMIT=certified and PLIMSOLL_CERTIFICATE=FILE",
    "the certificate lists the kinds of request that exceed the card, and the door refuses those alone",
)
_LOGPROBS = Remedy(
    "a smaller --max-logprobs; 0 refuses all but prompt_logprobs 0",
    "log-probabilities of a prompt need a row of the whole vocabulary for each of its tokens", "--max-logprobs",
)  # fmt: skip
_PIXELS = Remedy(
    "--mm-processor-kwargs '{\"max_pixels\": 1003520}'",
    "smaller pictures, where the model's processor takes it",
    "--mm-processor-kwargs",
)
_PICTURES = Remedy("--limit-mm-per-prompt '{\"image\": 1}'", "fewer pictures a request", "--limit-mm-per-prompt")
_LORAS = Remedy("a smaller --max-loras", "each adapter's slot is kept on the GPU", "--max-loras")
_RANK = Remedy("--max-lora-rank N, the rank that your adapters really have", "slots are sized by it", "--max-lora-rank")
_SEQUENCES = Remedy("a smaller --max-num-seqs", "fewer rows of the vocabulary at once", "--max-num-seqs")
NOT_REMEDIES = (
    "a restart with the same settings: the same request does it again",
    "a HIGHER --gpu-memory-utilization: it takes room from exactly what failed",
    "resetting or switching off the prefix cache: it lies inside the KV cache, whose size never changes",
    "emptying torch's cache by hand: that was done before the step was tried again",
)


def contained_remedies(
    site: str, kind: str = "", *, tokens: int | None = None, room: Remedy = ROOM, has_neighbour: bool = False
) -> tuple[Remedy, ...]:
    """The changes that close this site, cheapest first; `tokens` is the size of a step that worked, `room` a computed share."""
    return (*((NEIGHBOUR,) if has_neighbour else ()), *_of_site(site, kind, tokens), room)


def _of_site(site: str, kind: str, tokens: int | None) -> Iterator[Remedy]:
    if kind == "prompt_logprobs" or site == "logits":
        yield from (CERTIFY, _LOGPROBS)
    elif site == "encoder" or kind == "pictures":
        yield from (_PIXELS, _PICTURES, CERTIFY)
        return  # the encoder works on whole inputs, however small the steps are
    elif site == "adapter" or kind == "adapter":
        yield from (_LORAS, _RANK)
        return
    elif site in ("sampler", "drafter"):
        yield _SEQUENCES
    yield _smaller_steps(tokens)


def _smaller_steps(tokens: int | None) -> Remedy:
    flag = "--max-num-batched-tokens"
    if tokens is None or tokens < LEAST_TOKENS:
        return Remedy(f"a smaller {flag}", "smaller steps; costs time to first token on long prompts", flag)
    return Remedy(
        f"{flag} {tokens}", "steps of that size worked here; costs time to first token on long prompts", flag, str(tokens)
    )
