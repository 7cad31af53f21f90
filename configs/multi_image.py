"""Qwen2.5-VL-7B on questions over two pictures (JourneyBench): shows several images in one prompt.

    torchrun --nproc_per_node 8 -m r1.train --config configs/multi_image.py

Hardware: meant for 8 GPUs of 80 GB on one host.
Expect: no published accuracy is known to us, and none of ours is measured yet; EasyR1 marks its script for this data
as one for debugging. A row with more pictures than rollout.limit_images is refused before the model loads.
"""

from r1.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
)

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-7B-Instruct", precision="amp"),
    data=DataConfig(
        train_files="hiyouga/journeybench-multi-image-vqa@train",
        val_files=("hiyouga/journeybench-multi-image-vqa@test",),
        format_prompt="configs/prompts/math.jinja",
        rollout_batch_size=256,
    ),
    rollout=RolloutConfig(limit_images=2),
    reward=RewardConfig(function="math"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="multi_image_7b"),
)
