"""Reads the YAML file that `vllm serve --config FILE` takes flags from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from plimsoll.errors import BadInput, TooLarge

BYTES_MAX = 1024 * 1024


def read_vllm_config(path: str) -> Mapping[str, object]:
    """The entries of the file, by flag name; BadInput if it is not a flat mapping that vLLM could read."""
    if not path.endswith((".yaml", ".yml")):
        raise BadInput(f"{path}: vLLM reads --config only from a .yaml or .yml file")
    try:
        with Path(path).open("rb") as file:
            content = file.read(BYTES_MAX + 1)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}") from None
    if len(content) > BYTES_MAX:
        raise TooLarge(f"{path}: larger than {BYTES_MAX // 1024} KiB, which is no list of flags")
    from plimsoll.sources.yaml_tree import documents_in  # brings pyyaml

    try:
        documents = documents_in(content.decode("utf-8"), path, booleans=True)
    except UnicodeDecodeError:
        raise BadInput(f"{path}: not text") from None
    found = next(iter(documents), None)
    if not isinstance(found, dict):
        raise BadInput(f"{path}: not a mapping of flag names to values")
    return {str(key): value for key, value in found.items()}
