"""Qwen2.5-VL-3B counts objects in rendered scenes (CLEVR-70k): the R1-V recipe with <answer> tags.

    torchrun --nproc_per_node 8 -m r1.train --config configs/clevr70k.py

Hardware: meant for 8 GPUs of 40 GB; EasyR1's script runs it on 2 of 80 GB, with --nproc_per_node 2.
Expect: no published accuracy is known to us, and none of ours is measured yet. Watch val/*/accuracy rise and
reward/format go to 1. Data, prompt and reward are those of EasyR1's qwen2_5_vl_3b_clevr baseline script.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-3B-Instruct", precision="amp"),
    data=DataConfig(
        train_files="BUAADreamer/clevr_count_70k@train",
        val_files=("BUAADreamer/clevr_count_70k@test",),
        format_prompt="configs/prompts/r1v.jinja",
    ),
    reward=RewardConfig(function="r1v"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="clevr70k_3b"),
)
