"""Dr. GRPO (arXiv 2503.20783) on geometry3k: no bias by a question's difficulty or a response's length, no KL.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_dr_grpo.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: no figure on this data is known to us; configs/geo3k.py has GRPO's, the README this method's on the demo.
The paper's settings: rewards minus their group's mean, not divided by its deviation; sums over tokens divided by a
constant, max_response_length, so that long wrong responses weigh as much as short ones; clipping 0.2 / 0.2.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(
        advantage_std="none", aggregation="sequence_mean_token_sum", clip_low=0.2, clip_high=0.2, kl_coef=0.0
    ),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_dr_grpo"),
)
