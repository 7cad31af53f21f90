"""A tiny vision-language model learns to count shapes in pictures, on two CPU cores or a GPU.

    make demo        # or: python tools/make_demo.py && torchrun --nproc_per_node 2 -m r1.train --config configs/demo.py

Hardware: two CPU cores and 4 GiB of memory; about two minutes with start-up, or a GPU.
Expect: `val/held_out/accuracy` on held-out pictures from about 0.35 to above 0.9. Without the picture 0.2 is the most
that any policy can reach: every question comes with each of its five answers equally often.
"""

from r1.config import (
    AlgorithmConfig,
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
    model=ModelConfig(path="runs/demo-data/model", precision="float32", gradient_checkpointing=False),
    data=DataConfig(
        train_files="runs/demo-data/train.jsonl",
        val_files=("held_out=runs/demo-data/val.jsonl",),
        max_prompt_length=64,
        max_response_length=12,
        rollout_batch_size=32,
        min_pixels=84 * 84,
        max_pixels=84 * 84,
        num_workers=1,
    ),
    rollout=RolloutConfig(
        n=8,
        val=ValSamplingConfig(temperature=0.0, top_p=1.0),
        kv_cache_gib=0.25,
        enforce_eager=True,
    ),
    reward=RewardConfig(function="math", kwargs={"format_weight": 0.0}, num_workers=1),
    algorithm=AlgorithmConfig(kl_coef=0.0),
    optim=OptimConfig(lr=3e-4, schedule="linear", betas=(0.9, 0.99), weight_decay=0.0),
    update=UpdateConfig(global_batch_size=16, max_tokens_per_microbatch=2048),
    trainer=TrainerConfig(experiment_name="demo", max_steps=60, val_freq=10, total_epochs=1),
)
