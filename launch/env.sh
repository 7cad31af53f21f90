# Environment of a run, one reason a line; sourced by the scripts beside it. What is set already stays as it is.

export PATH="${VENV:-$PWD/.venv}/bin:$PATH"                 # the environment `make setup` made; run from the repository root
export PYTHONUNBUFFERED=1                                  # a log file shows a line when it is printed, not 8 KiB later
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-true}"  # batches decode on all cores; unset, it turns off at a fork
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"             # ranks share the host's cores; torchrun's own default, said aloud
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"                    # says why a link fails, and nothing else
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-ERROR}" # one engine a rank: its lines, false warnings at each sync among them, drown the step line
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:False}"  # vLLM's sleep mode refuses True
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"  # seconds for ranks to save after SIGTERM; torch >= 2.13
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}"  # NCCL's flight recorder: the last collectives of each rank ...
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}"  # ... written when one of them times out, to files ...
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-/tmp/r1_nccl_rank_}"  # ... of this name + rank
# Where hosts have several networks, name the one to use: NCCL_SOCKET_IFNAME=eth0, GLOO_SOCKET_IFNAME=eth0 (no pattern),
# NCCL_IB_HCA=mlx5. HF_HOME and a checkpoint folder that all hosts see save downloads; HF_HUB_OFFLINE=1 where there is no hub.
# NCCL_NVLS_ENABLE=0 where NVLink multicast is not set up: NCCL then fails at start with "nvls" in its message.
