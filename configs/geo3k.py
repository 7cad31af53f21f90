"""Qwen2.5-VL-7B learns geometry from pictures: GRPO, float32 master weights.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k.py      (or: make train-7b)

Hardware: meant for 8 GPUs of 80 GB on one host, and 370 GiB of disk for checkpoints of 93 GiB: three are kept.
Expect: test accuracy 0.37 before, 0.48 after (+0.11). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), same model, data, batch sizes, learning rate and KL; not yet repeated with r1.
The settings are those of EasyR1's qwen2_5_vl_7b_geo3k_grpo: 512 prompts x 5 responses a step, four optimizer steps,
clipping 0.2 / 0.3, KL loss 0.01, 15 epochs, validation at temperature 0.6 (all r1's defaults). One engine per GPU
where theirs spans two: a 7B model in bfloat16 fits one GPU.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-7B-Instruct", precision="amp"),
    data=DataConfig(
        train_files="hiyouga/geometry3k@train",
        val_files=("hiyouga/geometry3k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    reward=RewardConfig(function="math"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="geo3k_7b"),
)
