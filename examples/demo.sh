#!/usr/bin/env bash
# What `make demo` runs: the best true thing the product can do so far, on a real start script, without a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
plimsoll=.venv/bin/plimsoll

echo "A start script from a 2024 article on vLLM in production, checked against today's vLLM:"
echo
echo "  \$ plimsoll flags --vllm 0.32.0 examples/article-start.sh"
echo
"$plimsoll" flags --vllm 0.32.0 examples/article-start.sh || [ $? -eq 1 ]
echo
echo "What an upgrade changes for a command that nobody touched:"
echo
echo "  \$ plimsoll flags --from 0.19.0 --vllm 0.32.0 -- vllm serve Qwen/Qwen3-8B --max-model-len 32k"
echo
"$plimsoll" flags --from 0.19.0 --vllm 0.32.0 -- vllm serve Qwen/Qwen3-8B --max-model-len 32k || [ $? -eq 1 ]
