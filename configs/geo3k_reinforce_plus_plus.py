"""REINFORCE++ with baseline (arXiv 2501.03262) on geometry3k: rewards less their group's mean, whitened over the batch.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_reinforce_plus_plus.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: no figure on this data is known to us; configs/geo3k.py has GRPO's, the README this method's on the demo.
The paper's form for several responses a prompt: one deviation for all tokens of a step, so that groups which are nearly
all right or wrong are not blown up, and the KL in the loss by k2. Its form for one response a prompt has no groups:
--algorithm.advantage reinforce_plus_plus --algorithm.kl_in reward --algorithm.kl_penalty k1 --rollout.n 1
--data.rollout_batch_size 2560 --update.global_batch_size 640
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(
        advantage="reinforce_plus_plus_baseline", clip_low=0.2, clip_high=0.2, kl_penalty="k2", kl_coef=0.001
    ),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_reinforce_plus_plus"),
)
