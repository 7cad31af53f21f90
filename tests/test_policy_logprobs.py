import pytest
import torch
from torch import nn

from r1.policy.logprobs import Head, score_tokens


class Identity(nn.Module):
    def forward(self, x):
        return x


def test_N01_temperature_divides_the_logits():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    scored = score_tokens(logits, Identity(), torch.tensor([0]), Head(temperature=0.5, chunk_tokens=8))
    assert scored.logprobs.item() == pytest.approx(-0.14293, abs=1e-5)
    p = torch.softmax(logits[0] / 0.5, -1)
    assert scored.entropy.item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-6)


def test_chunks_change_neither_values_nor_gradients():
    torch.manual_seed(0)
    head, labels = nn.Linear(8, 50), torch.randint(0, 50, (23,))
    grads, values = [], []
    for chunk in (4, 100):
        hidden = torch.randn(23, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head.zero_grad()
        got = score_tokens(hidden, head, labels, Head(temperature=0.7, chunk_tokens=chunk)).logprobs
        got.square().sum().backward()
        values.append(got.detach())
        grads.append((hidden.grad.clone(), head.weight.grad.clone()))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(grads[0], grads[1])
    expected = (torch.log_softmax(head(hidden) / 0.7, -1)).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(values[0], expected.detach())
