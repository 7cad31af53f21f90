#!/usr/bin/env bash
# Several hosts: start the same line on each, from the repository root; they meet at the head's address.
#   NNODES=2 HEAD=host-a:29500 launch/multi_node.sh --config configs/geo3k.py
# NNODES: hosts. HEAD: name and free port of the first host. RUN_ID: tells two runs on one head apart.
# NPROC_PER_NODE: ranks a host (default: one per visible GPU). R1_MODULE: what to run (default: r1.train).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec torchrun --nnodes "${NNODES:?how many hosts}" --nproc_per_node "${NPROC_PER_NODE:-gpu}" \
    --rdzv_backend c10d --rdzv_endpoint "${HEAD:?name:port of the first host}" --rdzv_id "${RUN_ID:-r1}" \
    -m "${R1_MODULE:-r1.train}" "$@"
