"""Qwen2.5-7B-Instruct on competition mathematics, text only.

    torchrun --nproc_per_node 8 -m r1.train --config configs/math12k.py

Hardware: meant for 8 GPUs of 80 GB on one host.
Expect: test accuracy 0.75 before, 0.77 after (+0.02). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), same model, data, batch sizes, learning rate and KL; not yet repeated with r1.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-7B-Instruct", precision="amp"),
    data=DataConfig(
        train_files="hiyouga/math12k@train",
        val_files=("hiyouga/math12k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    reward=RewardConfig(function="math"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="math12k_7b"),
)
