"""Qwen2.5-VL-7B on geometry3k with bfloat16 weights and optimizer states: half the memory of configs/geo3k.py.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_7b_bf16.py   (or: make train-7b-bf16)

Hardware: meant for 8 GPUs of 40 GB; EasyR1's table of estimates gives 4 of 40 GB, with --nproc_per_node 4.
Expect: test accuracy 0.37 before, 0.48 after (+0.11). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), same model, data, batch sizes, learning rate and KL; not yet repeated with r1.
Updates at learning rate 1e-6 are smaller than bfloat16's spacing, so the optimizer sums with Kahan's correction.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-7B-Instruct", precision="bf16"),
    data=DataConfig(
        train_files="hiyouga/geometry3k@train",
        val_files=("hiyouga/geometry3k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    reward=RewardConfig(function="math"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="geo3k_7b_bf16"),
)
