#!/usr/bin/env bash
# The plan of this directory for Megatron-LM's own trainer (tag core_v0.16.1), in its flags. Arguments go to it,
# and win over those below. It needs data, a number of steps and where to save, for example:
#   MEGATRON_LM=/path/to/Megatron-LM ./pretrain_gpt.sh --data-path data/train --split 99,1,0 \
#       --train-iters 1000 --lr-warmup-iters 100 --save checkpoints --save-interval 500 \
#       --load converted --dist-ckpt-strictness log_all
# Weights to start from: kit convert model DIRECTORY --to megatron --out converted
set -euo pipefail
: "${MEGATRON_LM:?directory of a Megatron-LM checkout}"
PYTHON="${PYTHON:-python}"
# Ranks that torchrun starts again must not meet at the addresses of those that died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
# Kernels start in the order they were issued, so that collectives overlap with the matmul before them.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Segments that grow in place fragment less when sequence lengths or stages differ.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# The last 2,000 collectives of each rank are kept, so that a time-out names the rank that did not come.
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}"
# And written when a collective times out.
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"
mkdir -p flight
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$PWD/flight/rank_}"
arguments=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --num-query-groups 8
    --kv-channels 128
    --normalization RMSNorm
    --norm-epsilon 1e-05
    --swiglu
    --disable-bias-linear
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --no-gradient-accumulation-fusion
    --calculate-per-token-loss
    --bf16
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 8
    --cp-comm-type all_gather
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --max-position-embeddings 131072
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --accumulate-allreduce-grads-in-fp32
    --overlap-grad-reduce
    --use-distributed-optimizer
    --optimizer adam
    --lr 1e-05
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-08
    --weight-decay 0.1
    --clip-grad 1.0
    --seq-length 131072
    --micro-batch-size 1
    --global-batch-size 8
    --lr-decay-style cosine
    --tokenizer-type NullTokenizer
    --vocab-size 128255
    --make-vocab-size-divisible-by 1
    --transformer-impl transformer_engine
    --ckpt-format torch_dist
    --group-query-attention
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 8.0
)
exec "$PYTHON" -m torch.distributed.run --nproc-per-node 8 --standalone "$MEGATRON_LM/pretrain_gpt.py" "${arguments[@]}" "$@"
