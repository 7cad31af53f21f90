#!/usr/bin/env bash
# One host: a rank per GPU. From the repository root:
#   launch/single_node.sh --config configs/geo3k.py [--rollout.n 8 ...]
# NPROC_PER_NODE: ranks (default: one per visible GPU). R1_MODULE: what to run (default: r1.train).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

exec torchrun --standalone --nproc_per_node "${NPROC_PER_NODE:-gpu}" -m "${R1_MODULE:-r1.train}" "$@"
