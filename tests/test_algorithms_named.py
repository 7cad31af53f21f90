"""An algorithm from a user's file: the README shows it, it computes what it says, and it needs no private name."""

import ast
import re
import textwrap
from typing import Any

import pytest
import torch

from r1.algorithms.advantage import ADVANTAGES
from r1.algorithms.correction import CORRECTIONS
from r1.algorithms.kl import KL_PENALTIES
from r1.algorithms.loss import LOSSES, Tokens
from r1.algorithms.named import function_of
from r1.algorithms.scores import Scores
from r1.config import AlgorithmConfig
from tests.shell import ROOT

EXAMPLE = ROOT / "tests" / "example_algorithm.py"
CONFIG = AlgorithmConfig(clip_high=0.5)


def test_the_readme_shows_the_example_whole() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"`tests/example_algorithm\.py` has[^\n]*:\n\n((?:    [^\n]*\n|\n)+)", readme)
    assert shown and textwrap.dedent(shown[1]).startswith(EXAMPLE.read_text())
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(code) <= 20, "20 lines were promised"


def tokens_of(logprobs: torch.Tensor) -> Tokens:
    """Two responses of one token, advantages 2 and -1; all other logprobs are 0."""
    zero = torch.zeros(2)
    return Tokens(
        logprobs=logprobs, entropy=zero, old_logprobs=zero, rollout_logprobs=zero, advantages=torch.tensor([2.0, -1.0]),
        owners=torch.tensor([0, 1]), loss_mask=torch.ones(2, dtype=torch.bool), weights=torch.ones(2),
    )  # fmt: skip


def test_a_loss_may_start_from_one_that_is_built_in() -> None:
    shown = re.search(r"good to start from:\n\n((?:    [^\n]*\n|\n)+)", (ROOT / "README.md").read_text())
    assert shown
    names: dict[str, Any] = {}
    exec(textwrap.dedent(shown[1]), names)
    loss = names["cautious"](tokens_of(torch.tensor([0.0, 0.1])), CONFIG)
    # -A ratio and 0.1 (log ratio)^2: -2 exp(0), and exp(0.1) + 0.001.
    assert loss.tolist() == pytest.approx([-2.0, 1.105171 + 0.001], abs=1e-6)


def test_an_advantage_of_ones_own_by_hand() -> None:
    above_median = function_of(f"{EXAMPLE}:above_median", ADVANTAGES, option="algorithm.advantage")
    rewards = torch.tensor([[0.0, 0.0, 9.0], [1.0, float("nan"), 2.0]])
    # Medians 0 and 1 (of two the lower); a response without a reward gets nothing.
    assert above_median(Scores(rewards=rewards, lengths=torch.ones(2, 3)), CONFIG).tolist() == [[0, 0, 9], [0, 0, 1]]


def test_a_loss_of_ones_own_by_hand() -> None:
    fading = function_of(f"{EXAMPLE}:fading", LOSSES, option="algorithm.loss")
    new = torch.tensor([0.0, 0.5], requires_grad=True)
    loss = fading(tokens_of(new), CONFIG)
    loss.sum().backward()
    # -A exp(-(moved / 0.5)^2): -2 exp(0), and 1 exp(-1); times the logprobs 0 and 0.5.
    assert loss.tolist() == pytest.approx([0.0, 0.5 * 0.367879], abs=1e-6)
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-2.0, 0.367879], abs=1e-6)


@pytest.mark.parametrize("table", [ADVANTAGES, LOSSES, KL_PENALTIES, CORRECTIONS])
def test_every_named_algorithm_is_a_public_function_with_a_docstring(table) -> None:
    for name, function in table.items():
        assert not function.__name__.startswith("_") and function.__doc__, name


def test_no_test_reaches_an_algorithm_by_a_private_name() -> None:
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("r1.algorithms"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{path.name} imports {private} from {node.module}"
