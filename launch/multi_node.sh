#!/usr/bin/env bash
# Several hosts: start the same line on each, from the repository root; they meet at the head's address.
#   NNODES=2 HEAD=host-a:29500 launch/multi_node.sh --config configs/geo3k.py
# NNODES: hosts. HEAD: name and free port of the first host. RUN_ID: tells two runs on one head apart.
# NPROC_PER_NODE: ranks a host (default: one per visible GPU). R1_MODULE: what to run (default: r1.train).
# MAX_RESTARTS: how often torchrun starts the ranks again, from the latest checkpoint, after one failed (default: 0).
# Exit code 75: stopped by checkpoint.deadline, SIGUSR1 or SIGTERM, and saved; the same command goes on from there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec python "$(dirname "${BASH_SOURCE[0]}")/torchrun.py" --nnodes "${NNODES:?how many hosts}" \
    --nproc_per_node "${NPROC_PER_NODE:-gpu}" --max_restarts "${MAX_RESTARTS:-0}" \
    --rdzv_backend c10d --rdzv_endpoint "${HEAD:?name:port of the first host}" --rdzv_id "${RUN_ID:-r1}" \
    -m "${R1_MODULE:-r1.train}" "$@"
