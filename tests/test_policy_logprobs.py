import pytest
import torch
from torch import nn

from r1.config import OptimConfig
from r1.policy.logprobs import Head, score_tokens
from r1.policy.optim import lr_factor, make_optimizer


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


@pytest.mark.parametrize(("start", "change", "times", "expected"), [(1.0, 6e-4, 100, 0.94), (0.02, 1e-6, 1000, 0.019)])
def test_N03_small_updates_survive_in_bf16_and_float32(start, change, times, expected):
    for dtype, tolerance in ((torch.bfloat16, 4e-3), (torch.float32, 5e-5)):
        model = nn.Linear(1, 1, bias=False).to(dtype)
        model.weight.data.fill_(start)
        # Adam's step is lr once its moments have settled on a constant gradient.
        optimizer = make_optimizer(model, OptimConfig(lr=change, weight_decay=0.0))
        for _ in range(times):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        assert model.weight.item() == pytest.approx(expected, rel=tolerance)


def test_schedules_by_hand():
    linear = OptimConfig(schedule="linear", warmup_steps=2, min_lr_ratio=0.1)
    assert [round(lr_factor(s, 6, linear), 4) for s in range(6)] == [0.3333, 0.6667, 1.0, 0.775, 0.55, 0.325]
    cosine = OptimConfig(schedule="cosine", min_lr_ratio=0.5)
    assert lr_factor(0, 4, cosine) == 1.0 and lr_factor(2, 4, cosine) == pytest.approx(0.75)
    assert lr_factor(7, 10, OptimConfig()) == 1.0
