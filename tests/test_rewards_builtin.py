"""The built-in reward functions, called as a user's would be."""

import math as mathematics
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import r1
from r1.config import RewardConfig
from r1.rewards import choice, cosine, dapo, iou, math, overlong, r1v, repetition
from r1.rewards import format as form
from r1.rewards.child import NAMES
from r1.rewards.runner import check_reward_function
from r1.rollout.responses import decode_responses, reward_inputs
from r1.types import Prompt, Rollout
from tests.tiny import make_tokenizer


def sample(response: str, gold: object = "42", *, length: int = 10, prompt: str = "") -> dict[str, object]:
    return {"response": response, "response_length": length, "ground_truth": gold, "prompt": prompt}


def test_math_weights_accuracy_and_format() -> None:
    rewards = math.compute_score(
        [
            sample(r"<think>6 times 7</think> \boxed{42}"),
            sample(r"\boxed{42}"),
            sample(r"<think>6 times 7</think> \boxed{41}"),
            sample(r"< think >6 times 7< / think >\boxed{42"),
        ]
    )
    assert [r["overall"] for r in rewards] == pytest.approx([1.0, 0.9, 0.1, 0.0])
    assert rewards[1] == {"overall": 0.9, "format": 0.0, "accuracy": 1.0, "gold_unparsable": 0.0}
    assert math.compute_score([sample(r"\boxed{42}")], format_weight=0.5)[0]["overall"] == 0.5


def test_G25_math_reads_other_forms_where_told_to() -> None:
    response = "2+40=42\n#### 42" + "\nand that is what it is" * 20
    assert math.compute_score([sample(response)], forms=["boxed", "hashes"])[0]["accuracy"] == 1.0
    assert math.compute_score([sample(response)])[0]["accuracy"] == 0.0


def test_R10_unparsable_gold_is_counted_and_never_rewarded() -> None:
    gold = "unparsable text!!"
    for reply in (gold, rf"\boxed{{{gold}}}", "5", r"\boxed{5}", f"<answer>{gold}</answer>", f"Answer: {gold}"):
        rewards = [
            math.compute_score([sample(reply, gold)])[0],
            r1v.compute_score(sample(reply, gold)),
            dapo.compute_score([sample(reply, gold)], 100, 20, 1.0)[0],
            choice.compute_score([sample(reply, gold)])[0],
            cosine.compute_score([sample(reply, gold)], 100)[0],
        ]
        assert [r["gold_unparsable"] for r in rewards] == [1.0] * 5
        assert max(r["accuracy"] for r in rewards) == 0.0


def test_R16_a_box_in_answer_tags() -> None:
    response = r"<answer>\boxed{42}</answer>"
    assert r1v.compute_score(sample(response))["accuracy"] == 1.0
    assert math.compute_score([sample(response)])[0]["accuracy"] == 1.0


def test_R08_think_opened_by_the_template() -> None:
    completion = "First, 2 plus 2.\n</think>\nThe answer is 4."
    assert form.compute_score([sample(completion, prompt="2+2?<think>\n")]) == [{"overall": 1.0}]
    assert form.compute_score([sample("First, 2 plus 2. It is 4.", prompt="2+2?<think>\n")]) == [{"overall": 0.0}]
    response = "First, 2 plus 2.\n</think>\nThe answer is \\boxed{4}."
    assert math.compute_score([sample(response, "4", prompt="2+2?<think>\n")])[0]["format"] == 1.0
    assert math.compute_score([sample(response, "4", prompt="2+2?")])[0]["format"] == 0.0
    assert math.compute_score([sample(r"\boxed{4}", "4", prompt="2+2?<think>\n")])[0]["format"] == 0.0


@pytest.mark.parametrize(
    ("response", "format_", "accuracy"),
    [
        ("<think>a</think><answer>42</answer>", 1, 1),
        (r"<think>a</think> <answer>\boxed{42}</answer>", 1, 1),  # R16
        ("<think>a</think><answer>41</answer>", 1, 0),
        ("<answer>41</answer> no, <answer>42</answer>", 0, 1),
        ("<answer>42</answer> no, <answer>4", 0, 0),
        ("42", 0, 1),
    ],
)
def test_r1v_tags(response: str, format_: float, accuracy: float) -> None:
    reward = r1v.compute_score(sample(response))
    overall = 0.5 * format_ + 0.5 * accuracy
    assert reward == {"overall": overall, "format": format_, "accuracy": accuracy, "gold_unparsable": 0.0}


def test_r1v_think_opened_by_the_template() -> None:
    assert r1v.compute_score(sample("a</think><answer>42</answer>", prompt="<think>\n"))["format"] == 1.0


def test_R20_overlong_penalty_counts_tokens() -> None:
    alone = overlong.compute_score([sample("x" * 1000, length=n) for n in (80, 90, 100, 101)], 100, 20)
    assert [r["overall"] for r in alone] == [0.0, -0.5, -1.0, -1.0]
    rewards = dapo.compute_score([sample("Answer: 42", length=n) for n in (80, 90, 100, 101)], 100, 20, 1.0)
    assert [r["overlong"] for r in rewards] == [0.0, -0.5, -1.0, -1.0]
    assert [r["overall"] for r in rewards] == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("so\nAnswer: $42$", 1),  # G33
        ("**Answer:** 42.", 1),
        ("Answer: 41\nAnswer: 42" + "\nthat is all" * 100, 1),  # G25: not only the last characters
        (r"Answer: \boxed{42}", 1),
        ("42", -1),
        ("Answer: 41", -1),
    ],
)
def test_dapo_reads_the_answer_line(response: str, accuracy: float) -> None:
    (reward,) = dapo.compute_score([sample(response)], 100, 20, 1.0)
    assert (reward["accuracy"], reward["accuracy_normalized"]) == (accuracy, (accuracy + 1) / 2)


def test_R18_without_its_libraries_a_grader_stops_the_run_at_start(tmp_path: Path) -> None:
    # As a wrapper with a catch-all would hide it: the import itself fails, in a process without the library.
    path = tmp_path / "own.py"
    path.write_text(
        "import sys\nsys.modules['mpmath'] = None\nfrom r1.rewards.grader import is_correct\n"
        "def main(rows):\n    return [{'overall': 0.0} for _ in rows]\n"
    )
    with pytest.raises(ValueError, match="cannot be imported: ModuleNotFoundError: import of mpmath halted"):
        check_reward_function(RewardConfig(function=str(path)))


@pytest.mark.parametrize(
    ("name", "response", "reward"),
    [
        ("think", "<think>a</think> b", 1.0),
        ("think", "<think>a</think>", 0.0),
        ("think", "<think>a</think> b </think> c", 0.0),
        ("boxed", r"<think>a</think> \boxed{1}", 1.0),
        ("boxed", r"<think>\boxed{1}</think> so", 0.0),
        ("answer", "<think>a</think><answer>b</answer>", 1.0),
        ("answer", "<answer>b</answer>", 0.0),
        (r"Answer: \d+", "Answer: 5", 1.0),
        (r"Answer: \d+", "Answer: 5.", 0.0),
    ],
)
def test_format(name: str, response: str, reward: float) -> None:
    assert form.compute_score([sample(response)], form=name) == [{"overall": reward}]


def test_repetition_counts_repeated_words() -> None:
    # a b c | b c d | c d a | d a b | a b c | b c d: 4 distinct of 6.
    texts = ["a b c d A b, c. d", "a b c d e f", "a b", "", "好好好好"]
    rewards = [r["overall"] for r in repetition.compute_score([sample(t) for t in texts], size=3)]
    assert rewards == pytest.approx([-2 / 6, 0.0, 0.0, 0.0, -1 / 2])


def test_cosine_rewards_short_right_and_long_wrong_answers() -> None:
    right = [
        r["overall"] for r in cosine.compute_score([sample(r"\boxed{42}", length=n) for n in (0, 50, 100, 101)], 100)
    ]
    wrong = [r["overall"] for r in cosine.compute_score([sample(r"\boxed{41}", length=n) for n in (0, 50, 99)], 100)]
    assert right == pytest.approx([1.0, 0.75, -1.0, -1.0])
    assert wrong == pytest.approx([-1.0, -0.75, -0.5 - 0.25 * (1 + mathematics.cos(0.99 * mathematics.pi))])


@pytest.mark.parametrize(
    ("response", "gold", "accuracy"),
    [
        (r"\boxed{B}", "B", 1),
        ("The answer is (B).", "B", 1),
        ("The answer is A. No, the answer is **B**", "B", 1),
        ("B", "B", 1),
        ("(b)", "B", 1),
        ("<answer>B. a dog</answer>", "B", 1),
        (r"\boxed{\text{a dog}}", "B", 1),  # the option's text
        (r"\boxed{a cat}", "B", 0),
        ("The answer is A", "B", 0),
        ("I believe that a long response in which B is named somewhere does not choose it", "B", 0),
        (r"the answer is B, \boxed{", "B", 0),
        ("The answer is a dog", "A", 0),
    ],
)
def test_choice(response: str, gold: str, accuracy: float) -> None:
    (reward,) = choice.compute_score([{**sample(response, gold), "options": ["a cat", "a dog"]}])
    assert (reward["overall"], reward["accuracy"]) == (accuracy, accuracy)


def test_R21_boxes_are_compared_in_one_picture() -> None:
    gold, response = [29.12, 56.09, 270.74, 473.53], "<answer>[0, 0, 643, 476]</answer>"
    (same,) = iou.compute_score([sample(response, gold)], gold_coordinates="model")
    assert same["overall"] == pytest.approx(100861.9 / 306068, abs=1e-4)
    (none,) = iou.compute_score([sample(response, gold)], threshold=0.5, gold_coordinates="model")
    assert (none["overall"], none["format"]) == (0.0, 1.0)
    # The file is 100 x 200, the model saw 50 x 50: its box [10, 10, 20, 30] is [20, 40, 40, 120] of the file.
    row = {
        **sample("so [10, 10, 20, 30]", "[20, 40, 40, 120]"),
        "image_sizes": [(100, 200)],
        "model_image_sizes": [(50, 50)],
    }
    assert iou.compute_score([row])[0]["overall"] == pytest.approx(1.0)
    assert iou.compute_score([{**row, "response": "[200, 200, 400, 600]"}], coordinates="thousand")[0]["iou"] == 1.0
    assert iou.compute_score([{**row, "response": "no box"}])[0] == {"overall": 0.0, "iou": 0.0, "format": 0.0}
    assert iou.compute_score([{**row, "response": "[20, 30, 10, 10]"}])[0]["iou"] == 0.0
    with pytest.raises(ValueError, match="needs model_image_sizes"):
        iou.compute_score([sample(response, gold)])


def test_reward_modules_import_without_torch() -> None:
    code = (
        f"import sys, {', '.join(f'r1.rewards.{name}' for name in (*NAMES, 'runner', 'process', 'judge'))};"
        "sys.exit(len({'torch', 'vllm', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(r1.__file__).parent.parent).returncode == 0


def test_R09_R15_every_reward_call_gets_the_same_keys_and_clean_text() -> None:
    tokenizer = make_tokenizer()
    text = "<think>a</think><answer>b</answer>"
    ids = tokenizer(text + "<|im_end|><|endoftext|>", add_special_tokens=False)["input_ids"]
    prompt = Prompt(row=3, text="?", prompt_ids=[1], sampler_ids=[1], ground_truth="b", fields={"question": "q"},
                    images=[Image.new("RGB", (28, 56))])  # fmt: skip
    rollout = Rollout(
        group=7, sample=0, prompt_ids=[1], response_ids=ids, rollout_logprobs=[0.0] * len(ids), truncated=False
    )
    decode_responses([rollout], tokenizer, skip_special_tokens=True)
    assert rollout.response == text
    # Training and validation both go through here.
    assert reward_inputs([rollout], [prompt], 7) == [
        {"question": "q", "response": text, "response_length": len(ids), "ground_truth": "b", "prompt": "?", "row": 3,
         "truncated": False, "model_image_sizes": [(28, 56)]}
    ]  # fmt: skip
    assert r1v.compute_score(reward_inputs([rollout], [prompt], 7)[0])["overall"] == 1.0
