"""GSPO (arXiv 2507.18071) on geometry3k: one ratio for a whole response, clipped within 4e-4, no KL.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_gspo.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: test accuracy 0.37 before, 0.48 after (+0.11). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2). policy/clip_frac_* count tokens whose own ratio leaves the tiny bounds, so they are large.
The paper's settings: clipping 3e-4 / 4e-4, each response's mean over tokens, then the mean over responses, four
minibatches a step.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(
        loss="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean_token_mean", kl_coef=0.0
    ),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_gspo"),
)
