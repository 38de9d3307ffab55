"""Starts the real vLLM once per case with dummy weights and reads what its profiler measured: activation, non-torch, graphs.

    python -m lab.gpu.measure_overhead OUT.json        # on a host with one GPU and vLLM 0.25.1; about a minute a case

`tests/captures/vllm-0.25.1-h200-overhead/starts.json` holds what an H200 gave on 2026-11-15. This file is that day's script put
into order afterwards; it has not been run again since.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "L": LLAMA,
    "Q8": QWEN,
    "Q32": QWEN | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "MIX": LLAMA | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None, "max_position_embeddings": 32768,
    },
    "QM": QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4,
        "num_hidden_layers": 48, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    },
    "GR": LLAMA | {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "intermediate_size": 12800, "num_hidden_layers": 40,
        "vocab_size": 49155, "tie_word_embeddings": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
        "logits_scaling": 16.0, "attention_multiplier": 0.0078125,
    },
    "G2": LLAMA | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16,
        "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip

# model, layers (0: all of them), runner, eager, batched tokens, sequences
Case = tuple[str, int, int, int, int, int]
CASES: tuple[Case, ...] = (
    ("L", 4, 2, 0, 8192, 1024), ("L", 4, 2, 1, 8192, 1024), ("L", 4, 1, 0, 8192, 1024), ("L", 4, 1, 1, 8192, 1024),
    ("L", 4, 2, 0, 2048, 256), ("L", 4, 2, 0, 16384, 1024), ("L", 4, 1, 1, 8192, 64), ("L", 4, 1, 1, 2048, 4),
    ("L", 0, 1, 0, 8192, 1024), ("Q8", 4, 2, 0, 8192, 1024), ("Q32", 0, 1, 0, 8192, 1024), ("QM", 4, 1, 0, 8192, 1024),
    ("QM", 4, 2, 0, 8192, 1024), ("QM", 4, 1, 1, 2048, 256), ("QM", 4, 1, 1, 8192, 64), ("MIX", 2, 1, 1, 8192, 1024),
    ("G2", 4, 1, 1, 8192, 1024), ("GR", 4, 1, 1, 8192, 1024),
)  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    """Start one engine in this process and return its figures in bytes."""
    model, layers, runner, eager, tokens, sequences = case
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="1" if runner == 2 else "0",
    )  # fmt: skip
    import importlib

    torch = importlib.import_module("torch")
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    record: dict[str, Any] = {"case": case}
    profile = worker.determine_available_memory

    def profile_and_record(self: Any) -> int:
        kv: int = profile(self)
        snapshot = self.init_snapshot
        record.update(
            total=snapshot.total_memory, free0=snapshot.free_memory, nt0=snapshot.non_torch_memory,
            weights=int(self.model_runner.model_memory_usage), nt=self.non_torch_memory, act=self.peak_activation_memory,
            est=self.cudagraph_memory_estimate, kv=kv,
        )  # fmt: skip
        return min(kv, 8 << 30)  # a small cache starts faster

    worker.determine_available_memory = profile_and_record
    for name in ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"):
        _record_graphs(importlib.import_module(name).GPUModelRunner, record, torch)
    config = dict(MODELS[model]) | ({"num_hidden_layers": layers} if layers else {})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        importlib.import_module("vllm").LLM(
            model=folder, skip_tokenizer_init=True, load_format="dummy", enforce_eager=bool(eager), max_model_len=8192,
            max_num_batched_tokens=tokens, max_num_seqs=sequences, gpu_memory_utilization=0.9, enable_prefix_caching=False,
        )  # fmt: skip
    return record


def _record_graphs(runner: Any, record: dict[str, Any], torch: Any) -> None:
    capture = runner.capture_model

    def capture_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        record["graph"] = capture(self, *args, **kwargs)
        record["end_free"] = torch.cuda.mem_get_info()[0]
        return record["graph"]

    runner.capture_model = capture_and_record


def main(arguments: list[str]) -> None:
    """Without a case: run every case in a process of its own. With one: run it and print its figures as the last line."""
    if len(arguments) == 2 and arguments[0] == "--case":
        print(json.dumps(measure(CASES[int(arguments[1])])), flush=True)
        os._exit(0)  # the engine's threads do not matter any more
    found = []
    for number in range(len(CASES)):
        command = [sys.executable, "-m", "lab.gpu.measure_overhead", "--case", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        found.append(json.loads(lines[-1]) if done.returncode == 0 and lines else {"case": CASES[number], "failed": True})
        Path(arguments[0]).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
