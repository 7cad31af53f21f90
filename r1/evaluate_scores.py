"""Scores of a validation set from the rewards of its responses: mean@k, maj@k and pass@k."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from r1.config import RewardConfig
from r1.rewards.choice import find_choice
from r1.rewards.grader import extract_answer, is_correct
from r1.rewards.r1v import find_answer

LONGEST_COMPARED = 200  # characters; longer answers are the same only if they are spelled alike
RIGHT = 0.5  # a correct_key above this is right: 1 of {0, 1} and of {-1, 1}

Finder = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """What is kept of one prompt's k responses."""

    rewards: list[dict[str, float] | None]  # [k] None: grading failed
    lengths: list[int]  # [k] tokens
    majority: float | None  # whether the answer given most often is right; None: nothing says what is right


def answer_finder(config: RewardConfig) -> Finder:
    """How the answer is found that a response votes for: as the reward function finds it, if it is a built-in one.

    For a function of the user's it is extract_answer: the last box, answer tag, #### or `Answer:` line.
    """
    for name in config.functions:
        if name == "math":
            return partial(extract_answer, forms=tuple(config.kwargs_of(name).get("forms", ("boxed",))))
        if name == "dapo":
            return partial(extract_answer, forms=("line",))
        if name == "r1v":
            return find_answer
        if name == "choice":
            return find_choice
    return extract_answer


def majority(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """The score of the answer that most of a prompt's responses give; among several such, their mean.

    Answers that the grader holds equal both ways vote together (0.5 and 1/2). A response without an answer does not
    vote; where none has one, the score is 0.
    """
    votes: list[tuple[str, list[float]]] = []
    for answer, score in zip(answers, scores, strict=True):
        if answer is None or not answer.strip():
            continue
        for known, members in votes:
            if _same(answer.strip(), known):
                members.append(score)
                break
        else:
            votes.append((answer.strip(), [score]))
    most = max((len(members) for _, members in votes), default=0)
    return fmean(fmean(members) for _, members in votes if len(members) == most) if votes else 0.0


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    if max(len(one), len(other)) > LONGEST_COMPARED:
        return False
    return is_correct(one, other) and is_correct(other, one)


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Chance that one of k responses is right, unbiased from n >= k of them, num_right of which are (arXiv 2107.03374).

    1 - C(n - c, k) / C(n, k)
    """
    return 1.0 - math.comb(n - num_right, k) / math.comb(n, k)


def right_of(rewards: Sequence[dict[str, float] | None], correct_key: str) -> list[bool] | None:
    """Which responses are right; a failed one is not. None where no result has the key."""
    if not any(one is not None and correct_key in one for one in rewards):
        return None
    return [one is not None and one.get(correct_key, 0.0) > RIGHT for one in rewards]


def score_prompt(
    rewards: list[dict[str, float] | None], lengths: list[int], texts: Sequence[str], find: Finder, correct_key: str
) -> Scored:
    """Judge one prompt's responses; the vote is counted where there are two or more."""
    right = right_of(rewards, correct_key) if len(rewards) > 1 else None
    vote = None if right is None else majority([find(text) for text in texts], [float(r) for r in right])
    return Scored(rewards=rewards, lengths=lengths, majority=vote)


def summarize(name: str, prompts: Sequence[Scored], correct_key: str) -> dict[str, float]:
    """Metrics of one validation set, `evaluate` has their meaning."""
    rewards = [one for prompt in prompts for one in prompt.rewards]
    total = max(len(rewards), 1)
    keys = sorted({key for one in rewards if one is not None for key in one} | {"overall"})
    metrics = {
        f"val/{name}/{'reward' if key == 'overall' else key}": sum((one or {}).get(key, 0.0) for one in rewards) / total
        for key in keys
    }
    metrics[f"val/{name}/response_length"] = sum(sum(prompt.lengths) for prompt in prompts) / total
    metrics[f"val/{name}/failed_frac"] = sum(one is None for one in rewards) / total
    n = max((len(prompt.rewards) for prompt in prompts), default=1)
    if n == 1 or right_of(rewards, correct_key) is None:
        return metrics
    counts = [sum(right_of(prompt.rewards, correct_key) or []) for prompt in prompts]
    metrics[f"val/{name}/mean@{n}"] = fmean(counts) / n
    metrics[f"val/{name}/maj@{n}"] = fmean(prompt.majority or 0.0 for prompt in prompts)
    for k in sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n}):
        metrics[f"val/{name}/pass@{k}"] = fmean(pass_at_k(n, count, k) for count in counts)
    return metrics
