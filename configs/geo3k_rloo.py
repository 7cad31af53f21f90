"""RLOO (arXiv 2402.14740) on geometry3k: each response against the mean of the others of its group; KL in the reward.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_rloo.py

Hardware: as configs/geo3k.py, whose model, data and batches it takes: meant for 8 GPUs of 80 GB.
Expect: no figure on this data is known to us; configs/geo3k.py has GRPO's, the README this method's on the demo.
The paper's settings: whole responses are the actions, so their tokens' gradients are summed; the KL is a part of the
reward; a rollout is used once, by one optimizer step, so that nothing is clipped and the sampler's logprobs would do.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig, UpdateConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(
        advantage="rloo", aggregation="sequence_mean_token_sum", kl_in="reward", kl_penalty="k1", kl_coef=0.001
    ),
    update=UpdateConfig(global_batch_size=512),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_rloo"),
)
