"""Qwen3-VL-30B-A3B, a mixture of 128 experts of which 8 compute a token, on geometry3k: bfloat16, pictures.

    torchrun --nproc_per_node 8 -m r1.train --config configs/qwen3_vl_30b_a3b_geo3k.py

Hardware: meant for 8 GPUs of 80 GB and 640 GB of host memory. Planned, not measured, by
`python tools/plan.py --config configs/qwen3_vl_30b_a3b_geo3k.py --gpus 8xH100-80GB`: 65 of 79 GiB a GPU at the
update's peak, 67 while sampling; 535 GiB on the host, of which 232 only while a checkpoint is written
(checkpoint.asynchronous=False waits instead). Each of the four engines caches 524,000 tokens.
Expect: not run yet; batch sizes, learning rate and KL are those of configs/geo3k.py. What to watch in a mixture of
experts: configs/qwen3_30b_a3b_math.py.
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
    model=ModelConfig(path="Qwen/Qwen3-VL-30B-A3B-Instruct", precision="bf16"),
    data=DataConfig(
        train_files="hiyouga/geometry3k@train",
        val_files=("hiyouga/geometry3k@test",),
        format_prompt="configs/prompts/math.jinja",
    ),
    rollout=RolloutConfig(tensor_parallel_size=2, gpu_memory_utilization=0.7),
    reward=RewardConfig(function="math"),
    update=UpdateConfig(max_tokens_per_microbatch=16384, logprob_chunk_tokens=1024),
    parallel=ParallelConfig(offload_reference=True),
    checkpoint=CheckpointConfig(save_freq=5, save_limit=3),
    trainer=TrainerConfig(experiment_name="qwen3_vl_30b_a3b_geo3k"),
)
