#!/usr/bin/env bash
# Usage: tools/slurm_train.sh PARTITION JOB_NAME CONFIG [arguments of train.py]
# GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS from the environment.
set -euo pipefail
if [ $# -lt 3 ]; then
    sed -n 2,3p "$0" >&2
    exit 2
fi
TOOLS=$(cd "$(dirname "$0")" && pwd)
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
if [ "$GPUS" -lt "$GPUS_PER_NODE" ]; then
    GPUS_PER_NODE=$GPUS
fi
# SRUN_ARGS is split into words on purpose.
# shellcheck disable=SC2086
PYTHONPATH="$TOOLS/..:${PYTHONPATH:-}" exec srun -p "$1" \
    --job-name="$2" \
    --gres=gpu:"$GPUS_PER_NODE" \
    --ntasks="$GPUS" \
    --ntasks-per-node="$GPUS_PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "${PYTHON:-python}" -u "$TOOLS/train.py" "$3" --launcher slurm "${@:4}"
