#!/usr/bin/env bash
# Usage: tools/dist_train.sh CONFIG GPUS [arguments of train.py]
# One process per GPU; without GPUs, processes on the CPU.
# More machines: NNODES, NODE_RANK, MASTER_ADDR and PORT from the environment.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n 2,4p "$0" >&2
    exit 2
fi
TOOLS=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$TOOLS/..:${PYTHONPATH:-}" exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$2" \
    "$TOOLS/train.py" "$1" --launcher pytorch "${@:3}"
