"""What follows the mixing in one layer: dense blocks, experts, shared experts, routers."""

from __future__ import annotations

from plimsoll.domain.model import FeedForward, Layer, ModelShape
from plimsoll.plan.weights_families import Family
from plimsoll.plan.weights_parts import Part, Ranks, Storage, linear, norm, share


def feed_forward_parts(layer: Layer, shape: ModelShape, family: Family, ranks: Ranks) -> list[Part]:
    """The parameters one rank holds of the layer's feed-forward half."""
    prefix = "mixer" if shape.text_model_type == "nemotron_h" else "mlp"
    parts: list[Part] = []
    if layer.feed_forward in (FeedForward.DENSE, FeedForward.DENSE_AND_EXPERTS):
        width = layer.intermediate_size or shape.intermediate_size or 4 * shape.hidden_size
        parts += _dense(prefix, shape.hidden_size, width, family, ranks.tensor)
    if layer.feed_forward in (FeedForward.EXPERTS, FeedForward.DENSE_AND_EXPERTS):
        parts += _experts(prefix, shape, family, ranks)
    return parts


def _dense(prefix: str, hidden: int, width: int, family: Family, ranks: int) -> list[Part]:
    rows = share(width, ranks) * (2 if family.gated else 1)
    return [
        *linear(f"{prefix}.up_proj", rows, hidden, bias=rows if family.mlp_bias else 0, pieces=2 if family.gated else 1),
        *linear(f"{prefix}.down_proj", hidden, share(width, ranks), bias=hidden if family.mlp_bias else 0),
    ]


def _experts(prefix: str, shape: ModelShape, family: Family, ranks: Ranks) -> list[Part]:
    moe = shape.moe
    assert moe is not None
    width = moe.intermediate_size or shape.intermediate_size or shape.hidden_size
    hidden = moe.latent_size or shape.hidden_size
    here = share(moe.experts, ranks.experts) if ranks.by_expert else moe.experts
    own = width if ranks.by_expert else share(width, ranks.experts)
    rows = own * (2 if family.gated else 1)
    router = Storage.FLOAT32 if family.router_float32 else Storage.PLAIN
    if shape.text_model_type == "gemma4_text":  # the experts stand beside the dense block, not in it
        prefix = "moe"
    parts = [
        Part(f"{prefix}.gate", moe.experts, shape.hidden_size, router),
        Part(f"{prefix}.experts.up_proj", rows, hidden, Storage.EXPERTS, here, 2 if family.gated else 1),
        Part(f"{prefix}.experts.down_proj", hidden, own, Storage.EXPERTS, here),
    ]
    if family.router_bias:
        parts.append(Part("bias", moe.experts, 1, Storage.FLOAT32 if family.router_bias == "float32" else Storage.PLAIN))
    if family.expert_bias:
        parts.append(Part("bias", rows + hidden, here))
    if moe.latent_size:  # Nemotron 3 Super: into the experts' width and back, on every rank
        parts += linear(f"{prefix}.fc1_latent_proj", moe.latent_size, shape.hidden_size)
        parts += linear(f"{prefix}.fc2_latent_proj", shape.hidden_size, moe.latent_size)
    if moe.shared_intermediate_size:
        parts += _dense(f"{prefix}.shared_expert", shape.hidden_size, moe.shared_intermediate_size, family, ranks.tensor)
        if family.shared_gate:
            parts.append(Part(f"{prefix}.shared_expert_gate", 1, shape.hidden_size))
    if shape.text_model_type == "gemma4_text":  # its own norms around the experts, and scales in the router
        parts += [*norm(shape.hidden_size, count=4), Part("per_expert_scale", moe.experts)]
    return parts
