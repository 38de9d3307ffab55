#!/bin/bash
# Production start of Qwen2-72B: the article's script, written anew from its description.
set -euo pipefail

MODEL_PATH="/data/models/Qwen2-72B-Instruct"
TP_SIZE=4
PORT=8000
HOST="0.0.0.0"
GPU_MEMORY_UTILIZATION=0.88
MAX_MODEL_LEN=32768
MAX_NUM_SEQS=64
MAX_NUM_BATCHED_TOKENS=24576
LOG_DIR="/var/log/vllm"

mkdir -p "$LOG_DIR"

# Memory: let segments grow, and collect garbage early.
export CUDA_VISIBLE_DEVICES=0,1,2,3
export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,garbage_collection_threshold:0.8"
export VLLM_ATTENTION_BACKEND=FLASH_ATTN

echo "Starting vllm serve for $MODEL_PATH on port $PORT"

python -m vllm.entrypoints.openai.api_server \
  --model "$MODEL_PATH" \
  --tensor-parallel-size $TP_SIZE \
  --port $PORT \
  --host $HOST \
  --gpu-memory-utilization ${GPU_MEMORY_UTILIZATION} \
  --max-model-len ${MAX_MODEL_LEN} \
  --max-num-seqs ${MAX_NUM_SEQS} \
  --max-num-batched-tokens ${MAX_NUM_BATCHED_TOKENS} \
  --block-size 16 \
  --swap-space 8 \
  --disable-log-requests \
  --enable-chunked-prefill \
  --max-num-on-the-fly-batches 4 \
  --dtype bfloat16 \
  --trust-remote-code \
  2>&1 | tee -a "$LOG_DIR/vllm_$(date +%Y%m%d).log"
