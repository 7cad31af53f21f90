"""Qwen2.5-VL-7B on geometry3k with LoRA: adapters of the language model train, the weights stay as they are.

    torchrun --nproc_per_node 1 -m r1.train --config configs/geo3k_7b_lora.py   (or: make train-7b-lora)

Hardware: meant for 1 GPU of 80 GB (frozen weights in bfloat16, no second model for the reference), faster on 8;
EasyR1's table of estimates gives 2 GPUs of 32 GB for LoRA on 7B. Not yet run with r1.
Expect: reward on the test set rises as in configs/geo3k.py; rank, alpha and the learning rate, ten times that of full
training, are those of EasyR1's LoRA examples.
"""

from r1.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RewardConfig,
    TrainerConfig,
)

config = Config(
    model=ModelConfig(path="Qwen/Qwen2.5-VL-7B-Instruct", lora=LoraConfig(rank=64, alpha=64)),
    data=DataConfig(
        train_files="hiyouga/geometry3k@train",
        val_files=("hiyouga/geometry3k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    reward=RewardConfig(function="math"),
    optim=OptimConfig(lr=1e-5),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="geo3k_7b_lora"),
)
