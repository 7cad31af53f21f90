"""Qwen2.5-72B-Instruct on math12k (text): bfloat16, four hosts of eight GPUs, one engine over each host.

    NNODES=4 HEAD=host-a:29500 launch/multi_node.sh --config configs/math_70b.py   (the same line on each host)
    sbatch --nodes 4 launch/slurm.sbatch --config configs/math_70b.py

Hardware: meant for 32 GPUs of 80 GB and 256 GB of host memory a node. Planned, not measured, by
`python tools/plan.py --config configs/math_70b.py --gpus 32xH100-80GB`: 75 of 79 GiB a GPU at the update's peak (30
of them gathered weights and gradients, 14 activations), 69 while sampling; 217 GiB a host, of which 135 only while a
checkpoint is written. Each engine caches 736,000 tokens, 180 responses of full length.
Expect: not run yet; batch sizes, learning rate and KL are those of configs/math12k.py.
"""

from r1.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-72B-Instruct", precision="bf16"),
    data=DataConfig(
        train_files="hiyouga/math12k@train",
        val_files=("hiyouga/math12k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    rollout=RolloutConfig(tensor_parallel_size=8),
    reward=RewardConfig(function="math"),
    update=UpdateConfig(max_tokens_per_microbatch=8192, logprob_chunk_tokens=1024),
    parallel=ParallelConfig(offload_reference=True),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="math_70b"),
)
