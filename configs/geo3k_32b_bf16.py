"""Qwen2.5-VL-32B on geometry3k: bfloat16, one engine over the eight GPUs of a host.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_32b_bf16.py   (or: make train-32b-bf16)

Hardware: meant for 8 GPUs of 80 GB and 600 GB of host memory. Planned, not measured, by
`python tools/plan.py --config configs/geo3k_32b_bf16.py --gpus 8xH100-80GB`: 76 of 79 GiB a GPU at the update's peak,
59 while sampling; 250 GiB on the host for what is offloaded, and as much again while a checkpoint is written
(checkpoint.asynchronous=False waits instead). Microbatches and LM head chunks are half and a quarter of the default.
Expect: test accuracy 0.50 before, 0.56 after (+0.06). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), same model, data, batch sizes, learning rate and KL; not yet repeated with r1.
The weights of 32B take 65 GB in bfloat16, more than one GPU can lend its engine: hence tensor_parallel_size=8.
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
    model=ModelConfig(path="Qwen/Qwen2.5-VL-32B-Instruct", precision="bf16"),
    data=DataConfig(
        train_files="hiyouga/geometry3k@train",
        val_files=("hiyouga/geometry3k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    rollout=RolloutConfig(tensor_parallel_size=8),
    reward=RewardConfig(function="math"),
    update=UpdateConfig(max_tokens_per_microbatch=8192, logprob_chunk_tokens=1024),
    parallel=ParallelConfig(offload_reference=True),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="geo3k_32b_bf16"),
)
