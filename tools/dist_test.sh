#!/usr/bin/env bash
# Usage: tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# One process per GPU; without GPUs, processes on the CPU.
# More machines: NNODES, NODE_RANK, MASTER_ADDR and PORT from the environment.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n 2,4p "$0" >&2
    exit 2
fi
TOOLS=$(cd "$(dirname "$0")" && pwd)
PYTHONPATH="$TOOLS/..:${PYTHONPATH:-}" exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$3" \
    "$TOOLS/test.py" "$1" "$2" --launcher pytorch "${@:4}"
