"""The model architectures that one release of vLLM registers."""

from __future__ import annotations

import ast
from typing import Any

from lab.catalogue.source_tree import SourceTree

# The tables that count: what serves by itself. Drafts, transformers' generic classes and plugins are no families.
_TABLES = {
    "_TEXT_GENERATION_MODELS": "text",
    "_EMBEDDING_MODELS": "embedding",
    "_LATE_INTERACTION_MODELS": "embedding",
    "_REWARD_MODELS": "classification",
    "_TOKEN_CLASSIFICATION_MODELS": "classification",
    "_SEQUENCE_CLASSIFICATION_MODELS": "classification",
    "_CROSS_ENCODER_MODELS": "classification",
    "_MULTIMODAL_MODELS": "multimodal",
    "_TRANSFORMERS_SUPPORTED_MODELS": "text",
    "_GENERATION_MODELS": "text",
    "_MODELS": "text",
}


def read_architectures(tree: SourceTree) -> list[dict[str, Any]]:
    """One row an architecture: its class, and what kind of model it is registered as first."""
    path = tree.path_of("vllm.model_executor.models.registry")
    kinds: dict[str, str] = {}
    for node in tree.parse(path).body if path is not None else ():
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            kind = _TABLES.get(target.id) if isinstance(target, ast.Name) else None
            for key in node.value.keys if kind is not None else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str) and kind is not None:
                    kinds.setdefault(key.value, kind)
    return [{"name": name, "kind": kinds[name]} for name in sorted(kinds)]
