"""Qwen3-30B-A3B, a mixture of 128 experts of which 8 compute a token, on competition mathematics: bfloat16, text.

    torchrun --nproc_per_node 8 -m r1.train --config configs/qwen3_30b_a3b_math.py

Hardware: meant for 8 GPUs of 80 GB and 600 GB of host memory. Planned, not measured, by
`python tools/plan.py --config configs/qwen3_30b_a3b_math.py --gpus 8xH100-80GB`: 62 of 79 GiB a GPU at the update's
peak, 67 while sampling; 500 GiB on the host, of which 228 only while a checkpoint is written
(checkpoint.asynchronous=False waits instead). Each of the four engines caches 535,000 tokens.
Expect: not run yet. Watch moe/max_share and moe/entropy, which each layer also has alone: an expert that no token is
sent to does not learn. No loss pulls routers towards an even load. Watch mismatch/abs_mean, too: where rounding makes
the engine choose another expert than the trainer, that token's logprob moves by more than rounding;
algorithm.correction="token_truncate" bounds what such tokens weigh.
"""

from r1.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    TrainerConfig,
    UpdateConfig,
)

config = Config(
    model=ModelConfig(path="Qwen/Qwen3-30B-A3B", precision="bf16"),
    data=DataConfig(
        train_files="hiyouga/math12k@train",
        val_files=("hiyouga/math12k@test",),
        format_prompt="configs/prompts/math.jinja",
        max_response_length=4096,
    ),
    rollout=RolloutConfig(tensor_parallel_size=2, gpu_memory_utilization=0.7),
    reward=RewardConfig(function="math"),
    update=UpdateConfig(max_tokens_per_microbatch=16384, logprob_chunk_tokens=1024),
    parallel=ParallelConfig(offload_reference=True),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="qwen3_30b_a3b_math"),
)
