"""POST /tokenize and /detokenize, and GET /v1/models."""

from __future__ import annotations

import uuid
from typing import Any

from plimsoll.standin.serve import fields
from plimsoll.standin.serve.chat import chat_text
from plimsoll.standin.serve.encoding import encoded, words_of
from plimsoll.standin.serve.fields import Field
from plimsoll.standin.serve.sending import JsonAnswer
from plimsoll.standin.serve.service import Service

TEXT = {"model": Field("str"), "prompt": Field("str", may_be_null=False), "return_token_strs": Field("bool")}
MESSAGES = {
    "model": Field("str"),
    "messages": Field("list", may_be_null=False),
    "add_generation_prompt": Field("bool", may_be_null=False),
    "return_token_strs": Field("bool"),
}
TOKENS = {"model": Field("str"), "tokens": Field("ids", may_be_null=False)}


async def tokenize(service: Service, body: dict[str, Any]) -> JsonAnswer:
    """The tokens of a text or of messages."""
    if "messages" in body:
        good = fields.check(MESSAGES, body)
        service.check_model(good.get("model"))
        text = chat_text(good["messages"], adds_prompt=good.get("add_generation_prompt", True))
    elif "prompt" in body:
        good = fields.check(TEXT, body)
        service.check_model(good.get("model"))
        text = good["prompt"]
    else:
        missing = (("body", name) for name in ("prompt", "messages"))
        raise fields.refusal([fields.problem("missing", loc, "Field required", body) for loc in missing])
    ids = await encoded(text)
    words = await words_of(ids) if good.get("return_token_strs") else None
    limit = service.engine.config.max_model_len
    return JsonAnswer(200, {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": words})


async def detokenize(service: Service, body: dict[str, Any]) -> JsonAnswer:
    """The text of tokens."""
    good = fields.check(TOKENS, body, needed=("tokens",))
    service.check_model(good.get("model"))
    return JsonAnswer(200, {"prompt": "".join(await words_of(good["tokens"]))})


def models(service: Service) -> JsonAnswer:
    """The names it serves one model under."""
    config, created = service.engine.config, service.created()
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": config.model,
            "parent": None,
            "max_model_len": config.max_model_len,
            "permission": [_permission(created)],
        }
        for name in service.names
    ]
    return JsonAnswer(200, {"object": "list", "data": cards})


def _permission(created: int) -> dict[str, Any]:
    return {
        "id": f"modelperm-{uuid.uuid4().hex[:16]}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
