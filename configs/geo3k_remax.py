"""ReMax (arXiv 2310.10505) on geometry3k: each response against the greedy one to the same prompt; KL in the reward.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_remax.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: no figure on this data is known to us; configs/geo3k.py has GRPO's, the README this method's on the demo.
The paper samples one response a prompt and one greedily, which is the baseline and is not trained on. Here it is four
and one: as many as GRPO's five to sample.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    rollout=replace(grpo.rollout, n=4),
    algorithm=AlgorithmConfig(advantage="remax", kl_in="reward", kl_penalty="k1", kl_coef=0.001),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_remax"),
)
