"""PPO (arXiv 1707.06347) with a critic on geometry3k: an expectation for every token, no groups, no KL.

    torchrun --nproc_per_node 8 -m r1.train --config configs/geo3k_ppo.py

Hardware: meant for 8 GPUs of 80 GB on one host; the critic is a second model of 7B with states of its own, both in host
memory except while it scores and learns.
Expect: no figure on this data is known to us; configs/geo3k.py has GRPO's, the README this method's on the demo.
Discount and lambda 1, no KL and a critic that learns five times faster than the policy, as Open-Reasoner-Zero (arXiv
2503.24290); clipping 0.2 / 0.2, as the paper. The critic learns alone in the first five steps: its head starts at 0.
"""

from dataclasses import replace

from geo3k import config as grpo

from r1.config import AlgorithmConfig

config = replace(
    grpo,
    algorithm=AlgorithmConfig(
        advantage="gae",
        gamma=1.0,
        lam=1.0,
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.0,
        critic_lr=5e-6,
        critic_warmup_steps=5,
    ),
    trainer=replace(grpo.trainer, experiment_name="geo3k_7b_ppo"),
)
