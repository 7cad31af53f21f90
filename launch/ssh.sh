#!/usr/bin/env bash
# Several hosts over plain ssh, started and ended from one of them. From the repository root, which all hosts must have
# at the same path (a shared file system, or copies), with the environment that `make setup` made:
#   HOSTS="host-a host-b" launch/ssh.sh --config configs/geo3k.py
# HOSTS: the first one is where the ranks meet. PORT: a free port there (default: 29500). SSH: how to reach a host
# (default: ssh with batch mode on). The variables of multi_node.sh (NPROC_PER_NODE, MAX_RESTARTS, R1_MODULE, RUN_ID,
# VENV) are handed on, and so is what FORWARD names (default: credentials of loggers and hubs, and network cards).
# Ctrl-C, SIGTERM, or the failure of one host ends all of them.
set -euo pipefail
read -ra HOST_LIST <<< "${HOSTS:?names of the hosts, as in HOSTS=\"host-a host-b\"}"
read -ra SSH_COMMAND <<< "${SSH:-ssh -tt -o BatchMode=yes -o ServerAliveInterval=30}"
FORWARD="NPROC_PER_NODE MAX_RESTARTS R1_MODULE RUN_ID VENV PYTHONPATH HF_TOKEN HF_HOME HF_HUB_OFFLINE WANDB_API_KEY \
NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME NCCL_IB_HCA OMP_NUM_THREADS ${FORWARD:-}"

settings=("NNODES=${#HOST_LIST[@]}" "HEAD=${HOST_LIST[0]}:${PORT:-29500}")
for name in $FORWARD; do
    if [ -n "${!name:-}" ]; then settings+=("$name=${!name}"); fi
done
command="cd $(printf %q "$PWD") && env $(printf '%q ' "${settings[@]}") launch/multi_node.sh $(printf '%q ' "$@")"

pids=()
trap 'kill "${pids[@]}" 2> /dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for host in "${HOST_LIST[@]}"; do
    # -tt: a terminal on the far side, whose end is what ends the ranks there. No input: one keyboard, several hosts.
    "${SSH_COMMAND[@]}" "$host" "$command" < /dev/null > >(sed -u "s/^/$host: /") 2>&1 &
    pids+=("$!")
done
code=0
for _ in "${pids[@]}"; do
    wait -n || { code=$?; break; }
done
exit "$code"
