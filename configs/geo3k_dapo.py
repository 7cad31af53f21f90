"""DAPO (arXiv 2503.14476) on geometry3k: dynamic sampling, clip-higher, mean over tokens, soft overlong, no KL.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_dapo.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: test accuracy 0.37 before, 0.50 after (+0.13). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), without the penalty for length. A step takes longer than GRPO's: groups that are all right
or all wrong are replaced by those of further prompts.
The paper's settings: clipping 0.2 / 0.28, groups kept where some but not all responses are right, a penalty over the
last fifth of max_response_length, 20 steps of warm-up.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig, RewardConfig

config = replace(
    grpo,
    reward=RewardConfig(
        function={"math": 1.0, "overlong": 1.0},
        kwargs={"math": {}, "overlong": {"max_response_length": 2048, "overlong_buffer_length": 410}},
    ),
    algorithm=AlgorithmConfig(
        clip_low=0.2, clip_high=0.28, kl_coef=0.0, filter_by="mean", filter_key="math/accuracy", filter_max_tries=20
    ),
    optim=replace(grpo.optim, warmup_steps=20),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_dapo"),
)
