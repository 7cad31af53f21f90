"""r1: reinforcement learning for language and vision-language models, one program under torchrun."""
