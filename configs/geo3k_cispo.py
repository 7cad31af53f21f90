"""CISPO (MiniMax-M1, arXiv 2506.13585) on geometry3k: weights are clipped, every token keeps its gradient; no KL.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_cispo.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: test accuracy 0.37 before, 0.50 after (+0.13). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2), with a KL of 0.01.
The paper's settings: no lower bound in effect, mean over tokens, no KL. It does not publish the upper bound; weights
up to 5 are ours, they cut what would dominate a minibatch.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(loss="cispo", clip_low=0.99, clip_high=4.0, kl_coef=0.0),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_cispo"),
)
