"""Qwen2.5-VL-3B on GeoQA-8k, geometry questions with pictures: the R1-V recipe with <answer> tags.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geoqa8k.py

Hardware: meant for 8 GPUs of 40 GB; EasyR1's baseline script asks for the same model and data.
Expect: no published accuracy is known to us, and none of ours is measured yet. Watch val/*/accuracy rise and
reward/format go to 1. Data, prompt and reward are those of EasyR1's qwen2_5_vl_3b_geoqa8k baseline script.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-3B-Instruct", precision="amp"),
    data=DataConfig(
        train_files="leonardPKU/GEOQA_8K_R1V@train",
        val_files=("leonardPKU/GEOQA_8K_R1V@test",),
        format_prompt="configs/prompts/r1v.jinja",
    ),
    reward=RewardConfig(function="r1v"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="geoqa8k_3b"),
)
