#!/usr/bin/env bash
# One host: a rank per GPU. From the repository root:
#   launch/single_node.sh --config configs/geo3k.py [--rollout.n 8 ...]
# NPROC_PER_NODE: ranks (default: one per visible GPU). R1_MODULE: what to run (default: r1.train).
# MAX_RESTARTS: how often torchrun starts the ranks again, from the latest checkpoint, after one failed (default: 0).
# Exit code 75: stopped by checkpoint.deadline, SIGUSR1 or SIGTERM, and saved; the same command goes on from there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec python "$(dirname "${BASH_SOURCE[0]}")/torchrun.py" --standalone --nproc_per_node "${NPROC_PER_NODE:-gpu}" \
    --max_restarts "${MAX_RESTARTS:-0}" -m "${R1_MODULE:-r1.train}" "$@"
