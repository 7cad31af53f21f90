"""Qwen2.5-VL-3B learns geometry from pictures: the smallest full run.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_3b.py   (or: make train-3b)

Hardware: meant for 8 GPUs of 40 GB on one host; EasyR1's table of estimates gives 4 of 40 GB, with --nproc_per_node 4.
Expect: test accuracy 0.24 before, 0.38 after (+0.14). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), same model, data, batch sizes, learning rate and KL; not yet repeated with r1.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-3B-Instruct", precision="amp"),
    data=DataConfig(
        train_files="hiyouga/geometry3k@train",
        val_files=("hiyouga/geometry3k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    reward=RewardConfig(function="math"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="geo3k_3b"),
)
