"""Qwen3-14B-Base on DAPO-17k: long responses by DAPO (arXiv 2503.14476).

    torchrun --nproc_per_node 8 -m r1.train --config configs/dapo17k.py

Hardware: meant for 8 GPUs of 80 GB on one host.
Expect: no published accuracy for this model is known to us, and none of ours is measured yet. Settings follow EasyR1's
qwen3_14b_dapo17k_dapo script, with one difference: a microbatch holds one longest prompt and response on one GPU, where
theirs spreads a sequence over GPUs.
"""

from r1.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
    ValSamplingConfig,
)

config = Config(
    model=ModelConfig(path="Qwen/Qwen3-14B-Base", precision="bf16"),
    data=DataConfig(
        train_files="Saigyouji-Yuyuko1000/dapo17k@train",
        val_files=("Saigyouji-Yuyuko1000/dapo17k@test",),
        format_prompt="configs/prompts/dapo.jinja",
        max_prompt_length=2048,
        max_response_length=20480,
    ),
    rollout=RolloutConfig(
        n=16,
        gpu_memory_utilization=0.8,
        max_num_batched_tokens=22528,
        val=ValSamplingConfig(n=16, temperature=1.0, top_p=0.7),
    ),
    reward=RewardConfig(
        function="dapo",
        kwargs={"max_response_length": 20480, "overlong_buffer_length": 4096, "overlong_penalty_factor": 1.0},
    ),
    algorithm=AlgorithmConfig(
        clip_low=0.2, clip_high=0.28, clip_dual=10.0, kl_coef=0.0, filter_by="mean", filter_key="accuracy_normalized"
    ),
    optim=OptimConfig(weight_decay=0.1, warmup_steps=10),
    update=UpdateConfig(global_batch_size=32, max_tokens_per_microbatch=22528),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="dapo17k_14b", total_epochs=10),
)
