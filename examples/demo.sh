#!/usr/bin/env bash
# What `make demo` runs: what the product can do so far, on real inputs, without a GPU, a model or vLLM.
set -euo pipefail
cd "$(dirname "$0")/.."
plimsoll=.venv/bin/plimsoll

show() {
  echo
  echo "== $1"
  shift
  echo "   \$ plimsoll $*"
  echo
  "$plimsoll" "$@" || [ $? -eq 1 ] # 1: a problem was found, which is what a demonstration is for
}

show "A start script from a 2024 article on vLLM in production, checked against today's vLLM" \
  flags --vllm 0.32.0 examples/article-start.sh
show "Will a 32B model serve its full context on one H100, and if not, what would help?" \
  plan --gpu H100 --vllm 0.32.0 vllm serve Qwen/Qwen3-32B
show "What an upgrade changes for a command that nobody touched" \
  plan --gpu H100 --from 0.19.0 --vllm 0.32.0 vllm serve Qwen/Qwen3-8B --max-model-len 32k
