"""Asks vLLM's own KV planner: JSON lines in on stdin, JSON lines out on stdout. ask_planner.py MODEL_FOLDER

Run by the engine's own Python; `lab.engine.planner` is the other end. A request is

    {"ranks": [[{"layer": "layers.0", "type": "FullAttentionSpec", "block_size": 16, ...}, ...], ...],
     "available": [bytes of each rank], "max_model_len": 8192, ...}

with the fields of vLLM's spec classes under their own names (dtypes and enums as text), and the settings of `configured`.
The answer is {"ok": true, "num_blocks": [...], ...}, or {"ok": false, "error": "ValueError", "message": "..."}.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, TextIO


def private_stdout() -> TextIO:
    """The pipe to whoever asks; from now on everything else that prints to stdout reaches stderr."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(pipe, "w", encoding="utf-8")


class Planner:
    """vLLM's planner, imported once, on a configuration whose figures each request sets anew."""

    def __init__(self, model: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.specs: Any = importlib.import_module("vllm.v1.kv_cache_interface")
        self.utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        managers: Any = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
        arguments: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        self.config: Any = arguments(
            model=model, load_format="dummy", max_model_len=2048, enforce_eager=True
        ).create_engine_config()
        managers.register_all_kvcache_specs(self.config)

    def configured(self, request: dict[str, Any]) -> Any:
        """The configuration with this request's settings; on a GPU the second runner is the default."""
        config = self.config
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if request.get("v2_runner", True) else "0"
        config.model_config.max_model_len = request["max_model_len"]
        config.model_config.original_max_model_len = -1 if request.get("auto_fit") else request["max_model_len"]
        config.scheduler_config.max_num_batched_tokens = request.get("max_num_batched_tokens", 8192)
        config.scheduler_config.async_scheduling = request.get("async_scheduling", True)
        config.scheduler_config.disable_hybrid_kv_cache_manager = not request.get("hybrid_manager", True)
        config.cache_config.kv_cache_layout = request.get("layout", "LBNHC")
        config.cache_config.mamba_cache_mode = request.get("state_mode", "none")
        config.cache_config.enable_prefix_caching = request.get("state_mode", "none") != "none"
        config.cache_config.num_gpu_blocks_override = request.get("num_blocks_override")
        config.parallel_config.pipeline_parallel_size = request.get("pp", 1)
        config.parallel_config.decode_context_parallel_size = request.get("dcp", 1)
        return config

    def spec(self, fields: dict[str, Any]) -> Any:
        """One of vLLM's own specs."""
        given = {name: value for name, value in fields.items() if name not in ("layer", "type")}
        if "dtype" in given:
            given["dtype"] = getattr(self.torch, given["dtype"])
        if "dtypes" in given:
            given["dtypes"] = tuple(getattr(self.torch, dtype) for dtype in given["dtypes"])
            given["shapes"] = tuple(tuple(shape) for shape in given["shapes"])
        if "kv_quant_mode" in given:
            given["kv_quant_mode"] = self.specs.KVQuantMode[given["kv_quant_mode"]]
        if "cache_role" in given:
            given["cache_role"] = self.specs.SparseCacheRole(given["cache_role"])
        if "mamba_type" in given:
            backends = importlib.import_module("vllm.v1.attention.backends.registry").MambaAttentionBackendEnum
            given["mamba_type"] = backends[given["mamba_type"]]
        return getattr(self.specs, fields["type"])(**given)

    def plan(self, request: dict[str, Any]) -> dict[str, Any]:
        """What vLLM makes of these layers and this memory."""
        config = self.configured(request)
        ranks = [{fields["layer"]: self.spec(fields) for fields in rank} for rank in request["ranks"]]
        pages = [[spec.page_size_bytes for spec in rank.values()] for rank in ranks]
        planned = self.utils.get_kv_cache_configs(config, ranks, request["available"])
        merged = self.utils.generate_scheduler_kv_cache_config(planned)
        bytes_per_block = self.utils._pool_bytes_per_block  # noqa: SLF001 - vLLM has no public name for it
        tokens, concurrency = self.utils.get_kv_cache_capacity(config, merged)
        return {
            "ok": True,
            "pages": pages,
            "num_blocks": [rank.num_blocks for rank in planned],
            "bytes_per_block": [bytes_per_block(config, rank.kv_cache_groups) for rank in planned],
            "groups": [self.group(config, stages) for stages in zip(*(rank.kv_cache_groups for rank in planned), strict=True)],
            "tokens": tokens,
            "max_concurrency": concurrency,
            "max_model_len": config.model_config.max_model_len,
        }

    def group(self, config: Any, stages: tuple[Any, ...]) -> dict[str, Any]:
        """One group over all stages."""
        spec = stages[0].kv_cache_spec
        return {
            "layers": len({name for stage in stages for name in stage.layer_names}),
            "block_size": spec.block_size,
            "blocks": -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes),
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request, whatever it is: vLLM's refusals are answers too."""
        try:
            return self.plan(request)
        except Exception as error:
            return {"ok": False, "error": type(error).__name__, "message": str(error)}


def main() -> None:
    """Answer until stdin ends."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="", HF_HUB_OFFLINE="1")
    out = private_stdout()
    planner = Planner(sys.argv[1])
    for line in sys.stdin:
        out.write(json.dumps(planner.answer(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
