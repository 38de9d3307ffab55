"""Salted hashes of a prompt's blocks: equal beginnings can be seen, and nothing else of the prompt.

Each hash covers its block and all before it, under a key that is not written down. Were a hash made from the one before
it and the block alone, who reads the file could try likely texts block by block without the key.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterator, Sequence

from plimsoll.inside import places
from plimsoll.inside.faults import FAULTS

BLOCK_TOKENS = 16
HASH_BYTES = 8
SALT_BYTES = 32

Mark = tuple[int, str]
"""A token's place and what stands there: placeholders of two pictures are the same tokens."""


def iter_hashes(
    token_ids: Sequence[int], salt: bytes, block: int = BLOCK_TOKENS, seed: str = "", marks: Sequence[Mark] = ()
) -> Iterator[str]:
    """The hash of each full block in turn, 16 hex digits; prompts of different `seed` share none."""
    running = hashlib.blake2b(seed.encode("utf-8", "replace"), digest_size=HASH_BYTES, key=hashlib.blake2b(salt).digest())
    running.update(b"\0")
    step = block * 8
    packed = memoryview(array("q", token_ids[: len(token_ids) // block * block])).cast("B")
    left = sorted(marks)
    for begin in range(0, len(packed), step):
        while left and left[0][0] * 8 < begin + step:
            running.update(b"\1" + left.pop(0)[1].encode("utf-8", "replace") + b"\0")
        running.update(packed[begin : begin + step])
        yield running.copy().hexdigest()


def shared_salt(wanted: str, folder: str | None, key: int) -> bytes:
    """The salt that all API servers of one vLLM server use: the one that was set, or a random one that they share by a file.

    Without a folder to share it in, a random one for this process: then hashes agree within one recording only.
    """
    if wanted:
        return wanted.encode("utf-8", "replace")
    fresh = os.urandom(SALT_BYTES)
    if folder is None:
        return fresh
    path = os.path.join(folder, f"salt-{key}-{places.start_ticks(key)}")  # noqa: PTH118
    try:
        places.sweep(folder)
        return _first_come(path, fresh)
    except OSError as error:
        FAULTS.note("sharing the salt", error)
        return fresh


def _first_come(path: str, fresh: bytes) -> bytes:
    """Whoever comes first writes the file whole or not at all; all others take what is in it."""
    own = f"{path}.{os.getpid()}"
    handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, fresh)
    finally:
        os.close(handle)
    try:
        os.link(own, path)
    except FileExistsError:
        with open(path, "rb") as file:  # noqa: PTH123
            said = file.read(SALT_BYTES)
        return said if len(said) == SALT_BYTES else fresh
    finally:
        os.unlink(own)  # noqa: PTH108
    return fresh
