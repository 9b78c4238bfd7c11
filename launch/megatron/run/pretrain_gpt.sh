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
# Between nodes: InfiniBand.
# Stop where the InfiniBand libraries are missing and do not fall back to TCP.
export NCCL_NET="${NCCL_NET:-IB}"
# 8 nodes: set these on each, or let slurm.sbatch do it.
: "${NODE_RANK:?rank of this node, from 0}" "${MASTER_ADDR:?address of node 0}"
MASTER_PORT="${MASTER_PORT:-29500}"
# gloo takes the address that the host's own name stands for, on Debian 127.0.1.1: name the interface.
kit_interface() {
  local address; address="$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')"
  # On node 0 itself the name may stand for 127.0.1.1, and its own address is reached over lo.
  case "$address" in 127.*|"") address="$(hostname -I | awk '{print $1}')" ;; esac
  ip -o -4 addr show | awk -v a="$address/" 'index($4, a) == 1 {print $2; found = 1} END {exit !found}' ||
    ip -o route get "$address" | sed -nE 's/.* dev ([^ ]+) .*/\1/p'
}
if [ -z "${GLOO_SOCKET_IFNAME:-}" ] && command -v ip >/dev/null; then
  GLOO_SOCKET_IFNAME="$(kit_interface "$MASTER_ADDR")"; export GLOO_SOCKET_IFNAME
fi
arguments=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
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
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 2
    --context-parallel-size 2
    --sequence-parallel
    --cp-comm-type p2p
    --max-position-embeddings 8192
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --accumulate-allreduce-grads-in-fp32
    --overlap-grad-reduce
    --use-distributed-optimizer
    --optimizer adam
    --lr 0.00015
    --adam-beta1 0.9
    --adam-beta2 0.95
    --adam-eps 1e-08
    --weight-decay 0.1
    --clip-grad 1.0
    --seq-length 8192
    --micro-batch-size 2
    --global-batch-size 512
    --lr-decay-style cosine
    --tokenizer-type NullTokenizer
    --vocab-size 128255
    --make-vocab-size-divisible-by 1
    --transformer-impl transformer_engine
    --ckpt-format torch_dist
    --group-query-attention
    --rotary-base 500000
)
exec "$PYTHON" -m torch.distributed.run --nproc-per-node 8 --nnodes 8 --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$MEGATRON_LM/pretrain_gpt.py" "${arguments[@]}" "$@"
