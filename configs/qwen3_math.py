"""Qwen3-4B, a thinking model, on competition mathematics: text only, longer responses.

    torchrun --nproc_per_node 8 -m r1.train --config configs/qwen3_math.py

Hardware: meant for 8 GPUs of 40 GB on one host.
Expect: no published accuracy is known to us, and none of ours is measured yet. The model writes <think> by itself;
responses are cut at 4,096 tokens, so watch response/clip_frac, and raise data.max_response_length if it stays high.
"""

from r1.config import CheckpointConfig, Config, DataConfig, ModelConfig, RewardConfig, TrainerConfig

config = Config(
    model=ModelConfig(path="Qwen/Qwen3-4B", precision="amp"),
    data=DataConfig(
        train_files="hiyouga/math12k@train",
        val_files=("hiyouga/math12k@test",),
        format_prompt="configs/prompts/math.jinja",
        max_response_length=4096,
    ),
    reward=RewardConfig(function="math"),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="qwen3_4b_math"),
)
