"""SAPO (arXiv 2511.20347) on geometry3k: a soft gate in place of the clip, no KL.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_sapo.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: test accuracy 0.37 before, 0.54 after (+0.17). Theirs, not ours: EasyR1's published table (its
assets/baselines.md, v0.3.2).
The paper's settings: the gate falls off at 1.0 where the advantage is positive and at 1.05 where it is negative; each
response's mean over tokens, then the mean over responses.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(
        loss="sapo", tau_positive=1.0, tau_negative=1.05, aggregation="sequence_mean_token_mean", kl_coef=0.0
    ),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_sapo"),
)
