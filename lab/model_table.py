"""Public models beyond the collection of config.json files: one row a model, each with where its facts are known from.

Read by `python -m lab.write_model_catalogue`. A model whose shape is not certain has no place here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# name: (what is said of it, whether it is a copy of config.json)
SOURCES: Mapping[str, tuple[str, bool]] = {
    "config.json": ("the model's own config.json, as published in ai-dynamo/aiconfigurator", True),
    "litgpt": ("Lightning-AI/litgpt, litgpt/config.py at 0006c973", False),
    "maxtext": ("AI-Hypercomputer/maxtext, hf_model_configs.py at 02b47fd8", False),
    "mlc": ("mlc-ai/mlc-llm, model_preset.py at 79d603f0", False),
    "transformers": ("huggingface/transformers, the defaults of its config class", False),
    "blocks": ("kevinstephano/thunder_model_blocks, mistral_config.py", False),
    "internevo": ("InternLM/InternEvo-HFModels, configuration_yi.py", False),
    "by-hand": ("entered from model cards", False),
    "cards-checked": ("entered from model cards, parameters checked", False),
    "hunyuan-a13b": ("entered from https://apxml.com/models/hunyuan-a13b, parameters checked", False),
    "granite-4.1": ("entered from its makers' table (https://arc-codex.com/article/b152637ab673996f473efcd13d58ff2b)", False),
    "logs": ("entered by hand and checked against weights and KV sizes in public vLLM logs", False),
    "name": ("taken as {like} by its name; not checked", False),
    "qwen2.5-name": (
        (
            "taken as {like} by its name, with the context and the quantisation of its siblings (Qwen2.5-7B-Instruct: "
            "github.com/vllm-project/vllm/issues/16757; -14B-Instruct-AWQ: z-changyu/Paper2code at e80e9c83); not checked"
        ),
        False,
    ),
    "qwen2.5-1.5b": (
        (
            "taken from {like}, which agrees with its config.json as saved anew in float16 in "
            "ilyassLambardi/Bilingual-Voice-Ai-Application-, models/Qwen2.5-1.5B-Instruct/config.json at 82a39dd2; its "
            "own data "
            "type was not read"
        ),
        False,
    ),
    "e5": (
        (
            "taken as {like}, because https://deepinfra.com/intfloat/multilingual-e5-large names xlm-roberta-large, 24 "
            "layers of "
            "1,024 and 512 tokens; not checked"
        ),
        False,
    ),
    "ministral-fp8": (
        (
            "taken from {like}; copies of the model cards say FP8 (8B: "
            "hf-p-cfw.fyan.top/mistralai/Ministral-3-8B-Instruct-2512, 3B: fast.hugflare.com/mattator/test, 14B: "
            "netfy.cydns.pro/hf/unsloth/Ministral-3-14B-Instruct-2512-FP8); which parts stay "
            "in 16 bits was not checked"
        ),
        False,
    ),
    "minicpm": (
        (
            "taken from {like}, which https://ai.gitcode.com/OpenBMB/MiniCPM-V-4_5-GPTQ names with SigLIP2-400M; the "
            "sizes of the "
            "encoder are those usual for SigLIP-400M, not checked"
        ),
        False,
    ),
    "jina": (
        (
            "taken as {like}, because https://jina.ai/news/jina-embeddings-v3-a-frontier-multilingual-embedding-model names "
            "XLM-RoBERTa, 559M parameters and 8,192 tokens; not checked, its adapters not counted"
        ),
        False,
    ),
    "ernie": ("the defaults of its config class in huggingface/transformers, not checked against its config.json", False),
    "ernie-moe": (
        (
            "the defaults of its config class in huggingface/transformers, which agree with https://apxml.com/models/"
            "ernie-45-21b-a3b in layers, heads, experts and context; not checked against its config.json"
        ),
        False,
    ),
    "kimi-linear": (
        (
            "a config of it in public code (public code search, file 68953713753), and the context of 1M in "
            "MoonshotAI/Kimi-Linear, README.md; its config.json was not read"
        ),
        False,
    ),
    "aisimulate": ("the model's own config.json, as published in the wheel aisimulate 0.13.0.dev202610270000000085", True),
    "torchtitan": ("pytorch/torchtitan 0.3.0, models/qwen3_5, whose sizes give the published number of parameters", False),
    "keras-params": ("taken as {like}, because keras-hub 0.32.0 counts as many parameters in it; not checked", False),
    "maxtext-wheel": ("AI-Hypercomputer/maxtext 0.2.5, hf_model_configs.py", False),
    "megatron-bridge": ("megatron-bridge 0.3.1, ministral3_provider.py", False),
    "nemotron-bridge": ("megatron-bridge 0.3.1, nemotron_h_provider.py", False),
    "transformers-class": (
        "the defaults of its config class in transformers 5.19.0, which give the published number of parameters",
        False,
    ),
    "lfm2-header": ("a C++ header made from its config.json (public code search, file 2041635304)", False),
    "qwen2-audio": ("a copy of its config.json (public code search, file 62468705986), with Qwen2Config's defaults", False),
    "cards-llmfit": ("entered from model cards; the wheel llmfit 1.1.17 lists the same sizes and number of parameters", False),
    "llmfit": ("the sizes that the wheel llmfit 1.1.17 lists for it, which give its number of parameters", False),
    "llmfit-class": (
        (
            "the sizes that the wheel llmfit 1.1.17 lists for it and the defaults of its config class in transformers 5.19.0, "
            "which together give its number of parameters"
        ),
        False,
    ),
    "llmfit-rest": (
        (
            "taken from {like} with the sizes that the wheel llmfit 1.1.17 lists for it, which give its number of "
            "parameters; its config.json was not read"
        ),
        False,
    ),
    "llmfit-like": (
        (
            "taken from {like}, which has the sizes and the number of parameters that the wheel llmfit 1.1.17 lists for it; "
            "its config.json was not read"
        ),
        False,
    ),
    "log": ("a public vLLM log that names the model and how it is quantised, with the usual group size", False),
}
# Copies that lack their quantization_config, so that they describe the unquantised model of another name.
RENAMED = {"zai-org/GLM-4.7-FP8": "zai-org/GLM-4.7"}
# Copies that lack theirs too, quantised as the model beside them (both cards: experts in 4 bits, groups of 32).
QUANTIZED_AS = {"moonshotai/Kimi-K2-Thinking": "moonshotai/Kimi-K2.5"}
_NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
# What hf_quant_config.json adds to models whose config.json does not say how they are quantised.
QUANTIZATION: Mapping[str, dict[str, Any]] = {
    "nvidia/Qwen3-32B-NVFP4": _NVFP4 | {"exclude_modules": ["lm_head"]},
    "nvidia/Qwen3-30B-A3B-NVFP4": _NVFP4 | {"exclude_modules": ["model.layers.*.mlp.gate", "lm_head"]},
    "nvidia/DeepSeek-V3-0324-NVFP4": {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["model.layers.*.self_attn*", "model.layers.*.mlp.gate", "model.layers.61*", "lm_head"],
    },
}
CLASSES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "phi": "PhiForCausalLM", "gemma": "GemmaForCausalLM", "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM", "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "olmoe": "OlmoeForCausalLM", "granite": "GraniteForCausalLM", "cohere": "CohereForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM", "opt": "OPTForCausalLM", "falcon": "FalconForCausalLM", "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM", "glm4_moe": "Glm4MoeForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "jamba": "JambaForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen2_vl": "Qwen2VLForConditionalGeneration",
}  # fmt: skip
COLUMNS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size", "max_position_embeddings")  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}
_QWEN_VIT = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14}
_QWEN2_VIT = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14}
_FP8_CHANNEL = {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
_INT8_CHANNEL = {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}
_COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
# Words a row may end with.
WORDS: Mapping[str, dict[str, Any]] = {
    "f16": {"torch_dtype": "float16"},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "hd64": {"head_dim": 64},
    "hd128": {"head_dim": 128},
    "hd256": {"head_dim": 256},
    "no-window": {"sliding_window": None},
    "window-4096": {"sliding_window": 4096},
    "window-2047": {"sliding_window": 2047},
    "window-32768": {"sliding_window": 32768},
    "window-262144": {"sliding_window": 262144},
    "local-512": {"sliding_window": 512, "sliding_window_pattern": 6},
    "llama3x8": {"rope_scaling": _LLAMA3 | {"factor": 8.0}},
    "llama3x32": {"rope_scaling": _LLAMA3 | {"factor": 32.0}},
    "longrope": {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096},
    "yarn4": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "32k": {"max_position_embeddings": 32768},
    "128k": {"max_position_embeddings": 131072},
    "256k": {"max_position_embeddings": 262144},
    "awq": {"torch_dtype": "float16", "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
    "gptq": {"torch_dtype": "float16", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    "fp8-dynamic": {"quantization_config": _COMPRESSED | {"format": "float-quantized", "config_groups": _FP8_CHANNEL}},
    "w8a8": {"quantization_config": _COMPRESSED | {"format": "int-quantized", "config_groups": _INT8_CHANNEL}},
    "falcon-old": {"num_kv_heads": 71, "num_key_value_heads": None, "multi_query": True, "new_decoder_architecture": False},
    "falcon-new": {"num_kv_heads": 8, "num_key_value_heads": None, "new_decoder_architecture": True},
    "qwen-vit": {"vision_config": _QWEN_VIT, "rope_scaling": {"type": "mrope"}},
    "qwen-vit-wide": {"vision_config": _QWEN_VIT | {"intermediate_size": 3456}, "rope_scaling": {"type": "mrope"}},
    "qwen2-vit": {"vision_config": _QWEN2_VIT, "rope_scaling": {"type": "mrope"}},
}  # fmt: skip
MOE: Mapping[str, dict[str, Any]] = {
    "microsoft/Phi-3.5-MoE-instruct": {"num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": 131072},
    "allenai/OLMoE-1B-7B-0924": {"num_experts": 64, "num_experts_per_tok": 8},
    "Qwen/Qwen1.5-MoE-A2.7B": {
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "decoder_sparse_step": 1,
    },
    "zai-org/GLM-4.5-Air": {
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "rope_scaling": _YARN,
    },
    "deepseek-ai/DeepSeek-V2.5": {
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "rope_scaling": _YARN,
    },
    "ai21labs/AI21-Jamba-1.5-Mini": {
        "num_experts": 16, "num_experts_per_tok": 2, "attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    },
}  # fmt: skip

# id, source, family, hidden, layers, heads, KV heads, feed-forward, vocabulary, context, further words
ROWS = """
meta-llama/Llama-2-13b-hf litgpt llama 5120 40 40 40 13824 32000 4096 f16
meta-llama/Meta-Llama-3-8B litgpt llama 4096 32 32 8 14336 128256 8192
meta-llama/Meta-Llama-3-70B litgpt llama 8192 80 64 8 28672 128256 8192
meta-llama/Llama-3.1-8B litgpt llama 4096 32 32 8 14336 128256 131072 llama3x8
meta-llama/Llama-3.1-405B litgpt llama 16384 126 128 8 53248 128256 131072 llama3x8
meta-llama/Llama-3.2-1B litgpt llama 2048 16 32 8 8192 128256 131072 llama3x32 tied hd64
meta-llama/Llama-3.2-3B litgpt llama 3072 28 24 8 8192 128256 131072 llama3x32 tied hd128
codellama/CodeLlama-7b-hf litgpt llama 4096 32 32 32 11008 32016 16384
codellama/CodeLlama-13b-hf litgpt llama 5120 40 40 40 13824 32016 16384
codellama/CodeLlama-34b-hf litgpt llama 8192 48 64 8 22016 32000 16384
TinyLlama/TinyLlama-1.1B-Chat-v1.0 litgpt llama 2048 22 32 4 5632 32000 2048
HuggingFaceTB/SmolLM2-135M litgpt llama 576 30 9 3 1536 49152 8192 tied
HuggingFaceTB/SmolLM2-360M litgpt llama 960 32 15 5 2560 49152 8192 tied
HuggingFaceTB/SmolLM2-1.7B litgpt llama 2048 24 32 32 8192 49152 8192 tied
HuggingFaceTB/SmolLM3-3B cards-llmfit smollm3 2048 36 16 4 11008 128256 65536 tied
tiiuae/Falcon3-3B-Base litgpt llama 3072 22 12 4 9216 131072 32768 hd256
tiiuae/Falcon3-7B-Base litgpt llama 3072 28 12 4 23040 131072 32768 hd256
tiiuae/Falcon3-10B-Base litgpt llama 3072 40 12 4 23040 131072 32768 hd256
tiiuae/falcon-7b litgpt falcon 4544 32 71 - - 65024 - falcon-old
tiiuae/falcon-40b litgpt falcon 8192 60 128 - - 65024 - falcon-new
01-ai/Yi-6B internevo llama 4096 32 32 4 11008 64000 4096
01-ai/Yi-34B cards-llmfit llama 7168 60 56 8 20480 64000 4096
mistralai/Mistral-7B-v0.1 litgpt mistral 4096 32 32 8 14336 32000 32768 window-4096
mistralai/Mistral-7B-Instruct-v0.2 litgpt mistral 4096 32 32 8 14336 32000 32768 no-window
mistralai/Mistral-7B-v0.3 litgpt mistral 4096 32 32 8 14336 32768 32768 no-window
mistralai/Mistral-Nemo-Base-2407 blocks mistral 5120 40 32 8 14336 131072 128000 no-window hd128
mistralai/Ministral-8B-Instruct-2410 cards-llmfit mistral 4096 36 32 8 12288 131072 32768 window-32768 hd128
mistralai/Codestral-22B-v0.1 by-hand mistral 6144 56 48 8 16384 32768 32768 no-window hd128
mistralai/Mistral-Small-24B-Instruct-2501 cards-llmfit mistral 5120 40 32 8 32768 131072 32768 no-window hd128
mistralai/Mistral-Large-Instruct-2407 logs mistral 12288 88 96 8 28672 32768 131072 no-window hd128
Qwen/Qwen1.5-MoE-A2.7B mlc qwen2_moe 2048 24 16 16 5632 151936 32768
Qwen/Qwen2-0.5B-Instruct mlc qwen2 896 24 14 2 4864 151936 32768 tied
Qwen/Qwen2-1.5B-Instruct mlc qwen2 1536 28 12 2 8960 151936 32768 tied
Qwen/Qwen2-7B-Instruct mlc qwen2 3584 28 28 4 18944 152064 32768
Qwen/Qwen2.5-0.5B litgpt qwen2 896 24 14 2 4864 151936 32768 tied
Qwen/Qwen2.5-3B litgpt qwen2 2048 36 16 2 11008 151936 32768 tied
Qwen/Qwen2.5-7B litgpt qwen2 3584 28 28 4 18944 152064 131072
Qwen/Qwen2.5-14B litgpt qwen2 5120 48 40 8 13824 152064 131072
Qwen/Qwen2.5-Math-7B litgpt qwen2 3584 28 28 4 18944 152064 4096
Qwen/QwQ-32B litgpt qwen2 5120 64 40 8 27648 152064 131072
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B cards-llmfit qwen2 1536 28 12 2 8960 151936 131072 untied
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B cards-llmfit qwen2 3584 28 28 4 18944 152064 131072 untied
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B cards-llmfit qwen2 5120 48 40 8 13824 152064 131072 untied
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B cards-llmfit qwen2 5120 64 40 8 27648 152064 131072 untied
Qwen/Qwen3-1.7B litgpt qwen3 2048 28 16 8 6144 151936 40960 tied hd128
Qwen/Qwen3-4B litgpt qwen3 2560 36 32 8 9728 151936 40960 tied hd128
Qwen/Qwen3-14B litgpt qwen3 5120 40 40 8 17408 151936 40960 hd128
Qwen/Qwen2-VL-7B-Instruct logs qwen2_vl 3584 28 28 4 18944 152064 32768 untied qwen2-vit
Qwen/Qwen2.5-VL-3B-Instruct logs qwen2_5_vl 2048 36 16 2 11008 151936 128000 tied qwen-vit
Qwen/Qwen2.5-VL-7B-Instruct logs qwen2_5_vl 3584 28 28 4 18944 152064 128000 untied qwen-vit
Qwen/Qwen2.5-VL-32B-Instruct cards-llmfit qwen2_5_vl 5120 64 40 8 27648 152064 128000 untied qwen-vit-wide
Qwen/Qwen2.5-VL-72B-Instruct logs qwen2_5_vl 8192 80 64 8 29568 152064 128000 untied qwen-vit-wide
google/gemma-2b-it litgpt gemma 2048 18 8 1 16384 256000 8192 hd256
google/gemma-7b-it litgpt gemma 3072 28 16 16 24576 256000 8192 hd256
google/gemma-2-2b-it litgpt gemma2 2304 26 8 4 9216 256000 8192 hd256 window-4096
google/gemma-2-9b-it litgpt gemma2 3584 42 16 8 14336 256000 8192 hd256 window-4096
google/gemma-2-27b-it litgpt gemma2 4608 46 32 16 36864 256000 8192 hd128 window-4096
google/gemma-3-1b-it mlc gemma3_text 1152 26 4 1 6912 262144 32768 hd256 local-512
microsoft/phi-1_5 litgpt phi 2048 24 32 32 8192 51200 2048 f16
microsoft/phi-2 litgpt phi 2560 32 32 32 10240 51200 2048 f16
microsoft/Phi-3-mini-4k-instruct litgpt phi3 3072 32 32 32 8192 32064 4096 window-2047
microsoft/Phi-3-mini-128k-instruct litgpt phi3 3072 32 32 32 8192 32064 131072 window-262144 longrope
microsoft/Phi-3-medium-4k-instruct cards-llmfit phi3 5120 40 40 10 17920 32064 4096 window-2047
microsoft/Phi-3.5-MoE-instruct transformers phimoe 4096 32 32 8 6400 32064 131072 longrope
microsoft/phi-4 litgpt phi3 5120 40 40 10 17920 100352 16384 no-window
microsoft/Phi-4-mini-instruct litgpt phi3 3072 32 24 8 8192 200064 131072 window-262144 longrope tied
allenai/OLMo-7B-hf litgpt olmo 4096 32 32 32 11008 50304 2048
allenai/OLMo-2-1124-7B litgpt olmo2 4096 32 32 32 11008 100352 4096
allenai/OLMo-2-1124-13B litgpt olmo2 5120 40 40 40 13824 100352 4096
allenai/OLMoE-1B-7B-0924 cards-llmfit olmoe 2048 16 16 16 1024 50304 4096
ibm-granite/granite-3.1-2b-instruct cards-llmfit granite 2048 40 32 8 8192 49155 131072 tied
ibm-granite/granite-3.1-8b-instruct logs granite 4096 40 32 8 12800 49155 131072 tied
ibm-granite/granite-3.3-8b-instruct logs granite 4096 40 32 8 12800 49159 131072 tied
CohereForAI/c4ai-command-r-v01 transformers cohere 8192 40 64 64 22528 256000 131072 f16
CohereForAI/c4ai-command-r-plus by-hand cohere 12288 64 96 8 33792 256000 131072 f16
CohereForAI/c4ai-command-r-08-2024 by-hand cohere 8192 40 64 8 24576 256000 131072 f16
THUDM/glm-4-9b-chat-hf transformers glm 4096 40 32 2 13696 151552 131072 hd128
zai-org/GLM-4-9B-0414 cards-llmfit glm4 4096 40 32 2 13696 151552 32768 hd128
zai-org/GLM-4.5-Air transformers glm4_moe 4096 46 96 8 10944 151552 131072 hd128
deepseek-ai/DeepSeek-V2-Lite maxtext deepseek_v2 2048 27 16 16 10944 102400 163840
deepseek-ai/DeepSeek-V2.5 logs deepseek_v2 5120 60 128 128 12288 102400 163840
EleutherAI/gpt-neox-20b transformers gpt_neox 6144 44 64 - 24576 50432 2048 f16
EleutherAI/pythia-1.4b litgpt gpt_neox 2048 24 16 - 8192 50304 2048 f16
EleutherAI/pythia-6.9b litgpt gpt_neox 4096 32 32 - 16384 50432 2048 f16
EleutherAI/pythia-12b litgpt gpt_neox 5120 36 40 - 20480 50688 2048 f16
facebook/opt-125m logs opt 768 12 12 - 3072 50272 2048 f16
facebook/opt-1.3b cards-llmfit opt 2048 24 32 - 8192 50272 2048 f16
facebook/opt-2.7b logs opt 2560 32 32 - 10240 50272 2048 f16
facebook/opt-6.7b logs opt 4096 32 32 - 16384 50272 2048 f16
facebook/opt-13b logs opt 5120 40 40 - 20480 50272 2048 f16
facebook/opt-30b cards-llmfit opt 7168 48 56 - 28672 50272 2048 f16
facebook/opt-66b by-hand opt 9216 64 72 - 36864 50272 2048 f16
bigcode/starcoder2-3b cards-llmfit starcoder2 3072 30 24 2 12288 49152 16384 window-4096
bigcode/starcoder2-7b mlc starcoder2 4608 32 36 4 18432 49152 16384 window-4096
bigcode/starcoder2-15b logs starcoder2 6144 40 48 4 24576 49152 16384 window-4096 untied
ai21labs/AI21-Jamba-1.5-Mini logs jamba 4096 32 32 8 14336 65536 262144
"""
# id, the model it shares its shape with, who says so, words for what differs
ALIASES = """
meta-llama/Llama-2-7b-chat-hf meta-llama/Llama-2-7b-hf log
meta-llama/Llama-2-13b-chat-hf meta-llama/Llama-2-13b-hf litgpt
meta-llama/Llama-2-70b-chat-hf meta-llama/Llama-2-70b-hf log
meta-llama/Meta-Llama-3-8B-Instruct meta-llama/Meta-Llama-3-8B litgpt
meta-llama/Meta-Llama-3-70B-Instruct meta-llama/Meta-Llama-3-70B litgpt
meta-llama/Llama-3.1-8B-Instruct meta-llama/Llama-3.1-8B litgpt
meta-llama/Meta-Llama-3.1-8B meta-llama/Llama-3.1-8B litgpt
meta-llama/Meta-Llama-3.1-8B-Instruct meta-llama/Llama-3.1-8B litgpt
meta-llama/Llama-3.1-70B meta-llama/Meta-Llama-3.1-70B litgpt
meta-llama/Llama-3.1-70B-Instruct meta-llama/Meta-Llama-3.1-70B log
meta-llama/Meta-Llama-3.1-70B-Instruct meta-llama/Meta-Llama-3.1-70B log
meta-llama/Llama-3.1-405B-Instruct meta-llama/Llama-3.1-405B litgpt
meta-llama/Llama-3.2-1B-Instruct meta-llama/Llama-3.2-1B litgpt
meta-llama/Llama-3.2-3B-Instruct meta-llama/Llama-3.2-3B litgpt
deepseek-ai/DeepSeek-R1-Distill-Llama-8B meta-llama/Llama-3.1-8B litgpt
deepseek-ai/DeepSeek-R1-Distill-Llama-70B meta-llama/Meta-Llama-3.1-70B litgpt
nvidia/Llama-3.1-Nemotron-70B-Instruct-HF meta-llama/Meta-Llama-3.1-70B litgpt
hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 meta-llama/Meta-Llama-3.1-70B log awq
neuralmagic/Meta-Llama-3.1-70B-Instruct-quantized.w8a8 meta-llama/Meta-Llama-3.1-70B log w8a8
RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic meta-llama/Llama-3.3-70B-Instruct log fp8-dynamic
RedHatAI/Llama-3.3-70B-Instruct-quantized.w8a8 meta-llama/Llama-3.3-70B-Instruct log w8a8
codellama/CodeLlama-7b-Instruct-hf codellama/CodeLlama-7b-hf litgpt
codellama/CodeLlama-13b-Instruct-hf codellama/CodeLlama-13b-hf log
codellama/CodeLlama-34b-Instruct-hf codellama/CodeLlama-34b-hf litgpt
TheBloke/CodeLlama-34B-Instruct-AWQ codellama/CodeLlama-34b-hf log awq
HuggingFaceTB/SmolLM2-135M-Instruct HuggingFaceTB/SmolLM2-135M litgpt
HuggingFaceTB/SmolLM2-360M-Instruct HuggingFaceTB/SmolLM2-360M litgpt
HuggingFaceTB/SmolLM2-1.7B-Instruct HuggingFaceTB/SmolLM2-1.7B litgpt
tiiuae/Falcon3-7B-Instruct tiiuae/Falcon3-7B-Base litgpt
tiiuae/Falcon3-10B-Instruct tiiuae/Falcon3-10B-Base litgpt
tiiuae/falcon-7b-instruct tiiuae/falcon-7b litgpt
tiiuae/falcon-40b-instruct tiiuae/falcon-40b litgpt
01-ai/Yi-34B-Chat 01-ai/Yi-34B name
mistralai/Mistral-7B-Instruct-v0.1 mistralai/Mistral-7B-v0.1 litgpt
mistralai/Mistral-7B-Instruct-v0.3 mistralai/Mistral-7B-v0.3 litgpt
mistralai/Mistral-Large-Instruct-2411 mistralai/Mistral-Large-Instruct-2407 litgpt
TheBloke/Mistral-7B-Instruct-v0.2-GPTQ mistralai/Mistral-7B-Instruct-v0.2 log gptq
mistralai/Mixtral-8x7B-Instruct-v0.1 mistralai/Mixtral-8x7B-v0.1 log
mistralai/Mixtral-8x22B-Instruct-v0.1 mistralai/Mixtral-8x22B-v0.1 log
TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ mistralai/Mixtral-8x7B-v0.1 log awq
Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-0.5B litgpt
Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-3B litgpt
Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-7B https://github.com/vllm-project/vllm/issues/16757 32k
Qwen/Qwen2.5-14B-Instruct Qwen/Qwen2.5-14B qwen2.5-name 32k
Qwen/Qwen2.5-32B-Instruct Qwen/Qwen2.5-32B qwen2.5-name 32k
Qwen/Qwen2.5-72B-Instruct Qwen/Qwen2.5-72B qwen2.5-name 32k
Qwen/Qwen2.5-7B-Instruct-AWQ Qwen/Qwen2.5-7B qwen2.5-name 32k awq
Qwen/Qwen2.5-32B-Instruct-AWQ Qwen/Qwen2.5-32B qwen2.5-name 32k awq
Qwen/Qwen2.5-72B-Instruct-AWQ Qwen/Qwen2.5-72B log 32k awq
Qwen/Qwen2.5-Coder-7B-Instruct Qwen/Qwen2.5-7B litgpt 32k
Qwen/Qwen2.5-Coder-14B-Instruct Qwen/Qwen2.5-14B litgpt 32k
Qwen/Qwen2.5-Coder-32B-Instruct Qwen/Qwen2.5-32B litgpt 32k
Qwen/Qwen2.5-Math-7B-Instruct Qwen/Qwen2.5-Math-7B litgpt
Qwen/Qwen2-VL-7B-Instruct-AWQ Qwen/Qwen2-VL-7B-Instruct log awq
moonshotai/Kimi-Dev-72B Qwen/Qwen2.5-72B logs
Qwen/Qwen3-4B-Instruct-2507 Qwen/Qwen3-4B litgpt 256k
Qwen/Qwen3-4B-Thinking-2507 Qwen/Qwen3-4B litgpt 256k
Qwen/Qwen3-8B-FP8 Qwen/Qwen3-8B log fp8
Qwen/Qwen3-30B-A3B-Instruct-2507 Qwen/Qwen3-30B-A3B litgpt 256k
Qwen/Qwen3-30B-A3B-Thinking-2507 Qwen/Qwen3-30B-A3B maxtext 256k
Qwen/Qwen3-30B-A3B-Instruct-2507-FP8 Qwen/Qwen3-30B-A3B-FP8 log 256k
Qwen/Qwen3-235B-A22B-Instruct-2507 Qwen/Qwen3-235B-A22B https://www.fitmygpu.com/models/qwen-3-235b-a22b 256k
Qwen/Qwen3-235B-A22B-Thinking-2507 Qwen/Qwen3-235B-A22B maxtext 256k
Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 Qwen/Qwen3-235B-A22B-FP8 log 256k
Qwen/Qwen3-Next-80B-A3B-Instruct Qwen/Qwen3-Next-80B-A3B-Thinking name
deepseek-ai/DeepSeek-R1-0528 deepseek-ai/DeepSeek-V3 https://docs.api.nvidia.com/nim/reference/deepseek-ai-deepseek-r1-0528
deepseek-ai/DeepSeek-V3-0324 deepseek-ai/DeepSeek-V3 name
deepseek-ai/DeepSeek-R1-0528-Qwen3-8B Qwen/Qwen3-8B log 128k yarn4
deepseek-ai/DeepSeek-V2 deepseek-ai/DeepSeek-V2.5 name
deepseek-ai/DeepSeek-V2-Chat deepseek-ai/DeepSeek-V2.5 name
deepseek-ai/DeepSeek-V2-Lite-Chat deepseek-ai/DeepSeek-V2-Lite name
deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct deepseek-ai/DeepSeek-V2-Lite name
microsoft/Phi-3.5-mini-instruct microsoft/Phi-3-mini-128k-instruct litgpt
microsoft/Phi-4-reasoning microsoft/phi-4 litgpt 32k
microsoft/Phi-4-reasoning-plus microsoft/phi-4 litgpt 32k
microsoft/Phi-4-mini-reasoning microsoft/Phi-4-mini-instruct litgpt
allenai/OLMo-7B-Instruct-hf allenai/OLMo-7B-hf litgpt
allenai/OLMo-2-1124-7B-Instruct allenai/OLMo-2-1124-7B litgpt
allenai/OLMo-2-1124-13B-Instruct allenai/OLMo-2-1124-13B litgpt
allenai/OLMoE-1B-7B-0924-Instruct allenai/OLMoE-1B-7B-0924 name
zai-org/GLM-4.6 zai-org/GLM-4.7 https://www.fitmyllm.com/model/glm-4.6
MiniMaxAI/MiniMax-M2 MiniMaxAI/MiniMax-M2.5 transformers
CohereLabs/c4ai-command-r-v01 CohereForAI/c4ai-command-r-v01 name
CohereLabs/c4ai-command-r-plus CohereForAI/c4ai-command-r-plus name
CohereLabs/c4ai-command-r-08-2024 CohereForAI/c4ai-command-r-08-2024 name
"""


def _gemma3(hidden: int, layers: int, heads: int, width: int, feed_forward: int) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": width, "intermediate_size": feed_forward, "vocab_size": 262208,
        "max_position_embeddings": 131072, "sliding_window": 1024, "sliding_window_pattern": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    shell = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16"}
    return shell | {"text_config": text, "vision_config": _SIGLIP}


_MISTRAL_SMALL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 32768, "vocab_size": 131072,
        "max_position_embeddings": 131072, "sliding_window": None,
    },
    "vision_config": {
        "num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "patch_size": 14,
    },
}  # fmt: skip
# Models whose files have another form: (source, like, facts).
SPECIAL: Mapping[str, tuple[str, str | None, dict[str, Any]]] = {
    "google/gemma-3-4b-it": ("maxtext", None, _gemma3(2560, 34, 8, 256, 10240)),
    "google/gemma-3-12b-it": ("maxtext", None, _gemma3(3840, 48, 16, 256, 15360)),
    "google/gemma-3-27b-it": ("maxtext", None, _gemma3(5376, 62, 32, 128, 21504)),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": ("cards-llmfit", None, _MISTRAL_SMALL),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": ("logs", None, _MISTRAL_SMALL),
    "EleutherAI/gpt-j-6b": (
        "transformers",
        None,
        {
            "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16,
            "vocab_size": 50400, "n_positions": 2048,
        },
    ),
    "openai/gpt-oss-20b": (
        "by-hand",
        "openai/gpt-oss-120b",
        {"num_hidden_layers": 24, "num_local_experts": 32, "layer_types": ["sliding_attention", "full_attention"] * 12},
    ),
    "zai-org/GLM-4.5": ("cards-llmfit", "zai-org/GLM-4.7", {"max_position_embeddings": 131072}),
    "deepseek-ai/DeepSeek-V3.2": (
        "by-hand",
        "deepseek-ai/DeepSeek-V3.1",
        {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128,
            "index_n_heads": 64, "index_topk": 2048,
        },
    ),
}  # fmt: skip
