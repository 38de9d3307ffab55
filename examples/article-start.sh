#!/usr/bin/env bash
# A production start script of 2024, as an operations article gave it (rewritten here with the same flags and values).
# `plimsoll flags examples/article-start.sh` says what is left of it today.
MODEL_PATH="/data/models/Qwen2-72B-Instruct"
TP_SIZE=4
PORT=8000
HOST="0.0.0.0"
GPU_MEM_UTIL=0.88
MAX_MODEL_LEN=32768
MAX_NUM_SEQS=64
MAX_BATCHED_TOKENS=24576
LOG_DIR="/var/log/vllm"

export CUDA_VISIBLE_DEVICES=0,1,2,3
export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,garbage_collection_threshold:0.8"
export VLLM_ATTENTION_BACKEND=FLASH_ATTN

mkdir -p "$LOG_DIR"
python -m vllm.entrypoints.openai.api_server \
    --model "$MODEL_PATH" \
    --tensor-parallel-size "$TP_SIZE" \
    --port "$PORT" \
    --host "$HOST" \
    --gpu-memory-utilization "$GPU_MEM_UTIL" \
    --max-model-len "$MAX_MODEL_LEN" \
    --max-num-seqs "$MAX_NUM_SEQS" \
    --max-num-batched-tokens "$MAX_BATCHED_TOKENS" \
    --block-size 16 \
    --swap-space 8 \
    --disable-log-requests \
    --enable-chunked-prefill \
    --max-num-on-the-fly-batches 4 \
    --dtype bfloat16 \
    --trust-remote-code \
    2>&1 | tee -a "$LOG_DIR/vllm_$(date +%Y%m%d_%H%M%S).log"
