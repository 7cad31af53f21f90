"""Reward functions of users in child processes: limits, failures, start-up checks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import r1
from r1.config import RewardConfig
from r1.rewards import runner as runner_module
from r1.rewards.runner import RewardRunner, check_reward_function
from tests.test_readme import example

BOXED = r"""
import re
from typing import Any, Dict, List

from mathruler.grader import extract_boxed_content, grade_answer

REWARD_NAME = "boxed"
REWARD_TYPE = "batch"


def right(response: str, ground_truth: str) -> float:
    return 1.0 if grade_answer(extract_boxed_content(response), ground_truth) else 0.0


def compute_score(reward_inputs: List[Dict[str, Any]], format_weight: float = 0.1) -> List[Dict[str, float]]:
    if not isinstance(reward_inputs, list):
        raise ValueError("batch only")
    print("noise on stdout")
    scores = []
    for one in reward_inputs:
        tags = float(bool(re.fullmatch(r"<think>.*</think>.*", one["response"], re.DOTALL)))
        hit = right(one["response"], one["ground_truth"])
        scores.append({"overall": (1 - format_weight) * hit + format_weight * tags, "format": tags, "accuracy": hit})
    return scores
"""
SEQUENTIAL = """
import time, os
from typing import Any, Dict
import neighbour

REWARD_TYPE = "sequential"


def main(reward_input: Dict[str, Any], scale: float = 1.0) -> Dict[str, float]:
    assert isinstance(reward_input, dict)
    if reward_input["response"] == "hang":
        time.sleep(1000)
    if reward_input["response"] == "die":
        os._exit(3)
    return {"overall": scale * neighbour.length(reward_input["response"]), "extra": reward_input["level"]}
"""
ODD = """
import math, os, time


def main(reward_inputs):
    values = {"nan": math.nan, "none": None, "text": "1.0", "inf": math.inf, "true": True, "one": 1}
    rewards = []
    for one in reward_inputs:
        word = one["response"]
        if word == "raise":
            raise RuntimeError("bad\\nresponse")
        if word == "exit":
            raise SystemExit(1)
        if word == "hang":
            9 ** 9 ** 9 ** 9  # one C call that never looks at signals or other threads
        if word == "die":
            os._exit(3)
        rewards.append({"score": 1} if word == "keyless" else {"overall": values.get(word, 0.5)})
    return rewards
"""


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def config(function: str | dict[str, float], **settings: Any) -> RewardConfig:
    return RewardConfig(function=function, **{"timeout_s": 1.0, "num_workers": 2, **settings})


def inputs(*responses: str, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"response": r, "response_length": len(r), "ground_truth": "42", "prompt": "?", "row": 10 + i, **fields}
        for i, r in enumerate(responses)
    ]


def overall(rewards: list[dict[str, float] | None]) -> list[float | None]:
    return [None if one is None else one["overall"] for one in rewards]


def test_easyr1_batch_file_runs_unchanged_beside_a_file_named_like_ours(tmp_path: Path) -> None:
    path = write(tmp_path, "math.py", BOXED)
    check_reward_function(config(f"{path}:compute_score"))
    with RewardRunner(config(f"{path}:compute_score", kwargs={"format_weight": 0.5})) as runner:
        pending = runner.submit(inputs(r"<think>a</think>\boxed{42}", r"\boxed{42}", r"\boxed{41}") * 20)
        assert overall(pending.result()) == [1.0, 0.5, 0.0] * 20
        assert pending.failures == []


def test_sequential_file_with_neighbour_and_columns_and_default_name(tmp_path: Path) -> None:
    write(tmp_path, "neighbour.py", "def length(text):\n    return len(text)\n")
    path = write(tmp_path, "reward.py", SEQUENTIAL)
    with RewardRunner(config(path, kwargs={"scale": 2.0})) as runner:
        assert runner.submit(inputs("a", "bcd", level=3)).result() == [
            {"overall": 2.0, "extra": 3.0},
            {"overall": 6.0, "extra": 3.0},
        ]
        pending = runner.submit(inputs("ab", "hang", "die", "abc", level=1))
        assert overall(pending.result()) == [4.0, None, None, 6.0]
        assert pending.failures[0] == "row 11, response 1: TimeoutError: no answer within 1 s"
        assert "row 12, response 2: ChildProcessError" in pending.failures[1] and "status 3" in pending.failures[1]


def test_builtins_run_under_the_runner() -> None:
    settings = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 1.0}
    for name, kwargs, response in (
        ("math", {}, r"<think>a</think>\boxed{42}"),
        ("r1v", {}, "<think>a</think><answer>42</answer>"),
        ("dapo", settings, "Answer: 42"),
        ("choice", {}, r"\boxed{42}"),
        ("format", {}, "<think>a</think> b"),
        ("cosine", {"max_response_length": 10**6}, r"\boxed{42}"),
    ):
        check_reward_function(config(name, kwargs=kwargs))
        with RewardRunner(config(name, kwargs=kwargs, num_workers=1, timeout_s=10.0)) as runner:
            assert overall(runner.submit(inputs(response)).result()) == [pytest.approx(1.0)], name


def test_R11_R13_a_bad_response_costs_itself_only(tmp_path: Path) -> None:
    path = write(tmp_path, "odd.py", ODD)
    words = ["one", "raise", "nan", "none", "text", "inf", "true", "keyless", "exit", "die", "fine"]
    with RewardRunner(config(path)) as runner:
        pending = runner.submit(inputs(*words))
        assert overall(pending.result()) == [1, None, None, None, None, None, 1, None, None, None, 0.5]
        text = "\n".join(pending.failures)
        assert pending.failures[0] == "row 11, response 1: RuntimeError: bad response (at odd.py:11)"
        assert "row 12, response 2: ValueError: reward 'overall' is nan, not a finite number" in text
        assert "response 7: KeyError: the reward function returned no 'overall', only ['score']" in text  # R13
        assert len(pending.failures) == 8 == len(text.splitlines())
    with RewardRunner(config(path, on_error="raise")) as runner:
        with pytest.raises(ValueError, match="1 of 2 responses have no reward; the first: row 11, response 1: Value"):
            runner.submit(inputs("one", "nan")).result()


def test_R04_hung_processes_are_replaced(tmp_path: Path) -> None:
    with RewardRunner(config(write(tmp_path, "odd.py", ODD))) as runner:
        hanging = [runner.submit(inputs("hang")) for _ in range(4)]
        start = time.monotonic()
        assert overall(runner.submit(inputs("one")).result()) == [1]
        assert time.monotonic() - start < 10
        assert [one.result() for one in hanging] == [[None]] * 4
        assert overall(runner.submit(inputs("one", "hang", "one", "one")).result()) == [1, None, 1, 1]


def test_submit_returns_at_once_and_close_does_not_wait(tmp_path: Path) -> None:
    runner = RewardRunner(config(write(tmp_path, "odd.py", ODD), timeout_s=100.0))
    assert overall(runner.submit(inputs("one")).result()) == [1]
    start = time.monotonic()
    pending = runner.submit(inputs("hang"))
    assert time.monotonic() - start < 0.2
    time.sleep(0.3)
    runner.close()
    assert time.monotonic() - start < 3
    with pytest.raises(ValueError, match="closed before"):
        pending.result()
    with pytest.raises(ValueError, match="closed"):
        runner.submit(inputs("one"))


def test_a_killed_idle_process_is_replaced_and_children_know_no_torch(tmp_path: Path) -> None:
    code = """
import os, sys
def main(rows):
    return [{"overall": os.getpid(), "torch": "torch" in sys.modules} for _ in rows]
"""
    with RewardRunner(config(write(tmp_path, "pid.py", code), num_workers=1)) as runner:
        (first,) = runner.submit(inputs("a")).result()
        assert first is not None and first["torch"] == 0.0
        os.kill(int(first["overall"]), signal.SIGKILL)
        time.sleep(0.1)
        (second,) = runner.submit(inputs("a")).result()
        assert second is not None and second["overall"] != first["overall"]


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "hang.py",
        "import os\ndef main(rows):\n    open(rows[0]['file'], 'w').write(str(os.getpid()))\n    9 ** 9 ** 9 ** 9\n",
    )
    program = (
        "from r1.config import RewardConfig; from r1.rewards.runner import RewardRunner;"
        f"runner = RewardRunner(RewardConfig(function={path!r}, num_workers=1));"
        f"runner.submit([{{'file': {str(tmp_path / 'pid')!r}}}]).result()"
    )
    root = Path(r1.__file__).parent.parent
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=root)
    deadline = time.monotonic() + 30
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return  # dead; in a container nobody may collect it
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.parametrize(
    ("text", "suffix", "kwargs", "message"),
    [
        ("import no_such_thing", "", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("def main(:\n", "", {}, "cannot be imported: SyntaxError"),
        ("raise SystemExit(2)", "", {}, "cannot be imported: SystemExit: 2"),
        ("import os\nos._exit(4)", "", {}, r"the reward process died \(exit status 4\)"),
        ("def score(rows): pass", ":compute_score", {}, "has no 'compute_score'; its functions are score"),
        ("main = 5", "", {}, "has a non-callable 'main'"),
        ("REWARD_TYPE = 'bach'\ndef main(rows): pass", "", {}, "REWARD_TYPE = 'bach'; use one of"),
        ("def main(rows, a): pass", "", {}, r"do not fit bad.py:main\(rows, a\): missing a required argument: 'a'"),
        ("def main(rows): pass", "", {"b": 1}, "got an unexpected keyword argument 'b'"),
        ("def main(rows): return [{'score': 1, 'acc': 1}]", "", {}, r"no 'overall', only \['acc', 'score'\]"),
        ("def main(rows): return 1", "", {}, "returns one dict per response in a list, got 1"),
        ("def main(rows): return [0.5]", "", {}, "expected a dict with 'overall' for a response, got float 0.5"),
    ],
)
def test_check_names_the_mistake(tmp_path: Path, text: str, suffix: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_reward_function(config(write(tmp_path, "bad.py", text) + suffix, kwargs=kwargs))
    assert "\n" not in str(caught.value)


def test_check_names_missing_files_and_near_builtins() -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.py"):
        check_reward_function(config("nowhere.py:main"))
    with pytest.raises(ValueError, match="did you mean 'math'"):
        check_reward_function(config("maths"))


def test_check_accepts_functions_that_need_real_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "columns.py", "def main(rows): return [{'overall': len(r['question'])} for r in rows]")
    check_reward_function(config(path))


def test_a_file_that_no_longer_loads_is_an_error_not_zeros(tmp_path: Path) -> None:
    path = write(tmp_path, "gone.py", "import no_such_thing")
    with RewardRunner(config(path)) as runner, pytest.raises(ValueError, match="no_such_thing"):
        runner.submit(inputs("a")).result()


def test_inputs_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    with RewardRunner(config(write(tmp_path, "odd.py", ODD))) as runner:
        pending = runner.submit([*inputs("one"), *inputs("one", column=lambda: None)])
        assert overall(pending.result()) == [1, None]
        assert "do not fit through the pipe" in pending.failures[0]


GREEDY = """
kept = []


def main(rows):
    for row in rows:
        if row["response"] == "leak":
            kept.append(bytearray(40 << 20))
        if row["response"] == "greedy":
            [0] * (1 << 28)
    return [{"overall": 1.0, "kept": len(kept)} for _ in rows]
"""


def test_memory_of_a_process_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path, "greedy.py", GREEDY)
    with RewardRunner(config(path, memory_mb=128, num_workers=1, timeout_s=20.0)) as runner:
        pending = runner.submit(inputs("one", "greedy", "one"))
        assert overall(pending.result()) == [1.0, None, 1.0]
        assert pending.failures == [
            "row 11, response 1: MemoryError: grading took more memory than reward.memory_mb allows"
        ]
        # What earlier responses left behind is not held against a later one: it is tried again in a new process.
        results = [one for _ in range(5) for one in runner.submit(inputs("leak")).result()]
        assert overall(results) == [1.0] * 5
        assert max(one["kept"] for one in results if one) <= 3
    with RewardRunner(config(path, memory_mb=0, num_workers=1, timeout_s=20.0)) as runner:
        assert runner.submit(inputs("leak", "leak", "leak", "leak")).result()[0] == {"overall": 1.0, "kept": 4.0}


ASYNC = """
import asyncio, time

REWARD_TYPE = "sequential"
lock, most, now = None, 0, 0


async def main(row):
    global most, now
    now += 1
    most = max(most, now)
    try:
        if row["response"] == "raise":
            raise RuntimeError("bad response")
        if row["response"] == "block":
            time.sleep(1000)
        await asyncio.sleep(1000 if row["response"] == "hang" else 0.1)
    finally:
        now -= 1
    return {"overall": 1.0, "most": most}


async def batch(rows):
    return await asyncio.gather(*(main(row) for row in rows))


loop = None


async def one_loop(row):
    global loop
    loop = loop or asyncio.get_running_loop()
    return {"overall": float(loop is asyncio.get_running_loop())}
"""


def test_async_functions_work_on_a_batch_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "asynchronous.py", ASYNC)
    check_reward_function(config(path))
    with RewardRunner(config(path, num_workers=1, batch_size=8)) as runner:
        rewards = runner.submit(inputs(*["one"] * 20)).result()
        assert max(one["most"] for one in rewards if one) == 8.0
        pending = runner.submit(inputs("one", "raise", "hang", "one"))
        assert overall(pending.result()) == [1.0, None, None, 1.0]
        assert "row 11, response 1: RuntimeError: bad response" in pending.failures[0]
        assert pending.failures[1] == "row 12, response 2: TimeoutError: no answer within 1 s"
        assert overall(runner.submit(inputs("one", "block")).result()) == [1.0, None]  # killed from outside
    with RewardRunner(config(path + ":one_loop", num_workers=1)) as runner:
        for _ in range(2):
            assert overall(runner.submit(inputs("one")).result()) == [1.0]
    text = ASYNC.replace('"sequential"', '"batch"')
    with RewardRunner(config(write(tmp_path, "b.py", text) + ":batch", num_workers=1)) as runner:
        assert overall(runner.submit(inputs("one", "one")).result()) == [1.0, 1.0]


def test_several_functions_add_up_with_their_weights(tmp_path: Path) -> None:
    path = write(tmp_path, "length.py", "def main(rows, unit=1):\n    return [{'overall': len(r['response']) / unit,"
                                        " 'n': 1} for r in rows]\n")  # fmt: skip
    sequential = write(
        tmp_path, "odd_one.py", "REWARD_TYPE = 'sequential'\nasync def main(row):\n    return {'overall': 3}\n"
    )
    several = {"math": 1.0, "repetition": 0.5, path: -0.25, sequential: 2.0}
    settings = config(several, kwargs={path: {"unit": 10}}, timeout_s=10.0, num_workers=1)
    check_reward_function(settings)
    with RewardRunner(settings) as runner:
        (rewards,) = runner.submit(inputs(r"\boxed{42}")).result()
    assert rewards == {
        "overall": pytest.approx(0.9 + 0.5 * 0 - 0.25 * 1.0 + 2 * 3),
        "math/overall": 0.9, "math/format": 0.0, "math/accuracy": 1.0, "math/gold_unparsable": 0.0,
        "repetition/overall": 0.0, "length/overall": 1.0, "length/n": 1.0, "odd_one/overall": 3.0,
    }  # fmt: skip


def test_R11_R13_one_of_several_without_a_reward_excludes_the_response(tmp_path: Path) -> None:
    odd = write(tmp_path, "odd.py", ODD)
    two = {"format": 1.0, f"{odd}:main": 1.0}
    with RewardRunner(config(two, num_workers=1)) as runner:
        pending = runner.submit(inputs("one", "nan", "raise", "keyless", "hang", "one"))
        assert overall(pending.result()) == [1.0, None, None, None, None, 1.0]
        assert [line.split(": ")[1:3] for line in pending.failures[:3]] == [
            ["odd", "ValueError"], ["odd", "RuntimeError"], ["odd", "KeyError"]
        ]  # fmt: skip
    text = "def main(rows): return [{'score': 1, 'acc': 1} for _ in rows]"
    with pytest.raises(ValueError, match=r"no 'overall', only \['acc', 'score'\]"):
        check_reward_function(config({"math": 1.0, write(tmp_path, "keyless.py", text): 1.0}))


def test_functions_of_one_file_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, "both.py", "def a(rows): return [{'overall': 1} for _ in rows]\n"
                                      "def b(rows): return [{'overall': 2} for _ in rows]\n")  # fmt: skip
    with RewardRunner(config({f"{path}:a": 1.0, f"{path}:b": 10.0})) as runner:
        assert runner.submit(inputs("x")).result() == [{"overall": 21.0, "both.a/overall": 1.0, "both.b/overall": 2.0}]


def test_R15_a_function_that_never_works_is_an_error_not_zeros(tmp_path: Path) -> None:
    path = write(tmp_path, "reward.py", "def main(rows): return [{'overall': len(r['question'])} for r in rows]")
    with RewardRunner(config(path)) as runner:
        with pytest.raises(ValueError, match=r"none of 16 responses; the first: row 10, .*KeyError: 'question'"):
            runner.submit(inputs(*["a"] * 16)).result()
    with RewardRunner(config(path)) as runner:
        assert overall(runner.submit(inputs("a", question="why")).result()) == [3.0]
        assert overall(runner.submit(inputs(*["a"] * 16)).result()) == [None] * 16  # counted, and named one by one


def test_responses_after_many_hangs_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_HANGS", 3)
    settings = config(write(tmp_path, "odd.py", ODD), num_workers=1, batch_size=4, timeout_s=0.5)
    with RewardRunner(settings) as runner:
        assert overall(runner.submit(inputs("one")).result()) == [1]
        pending = runner.submit(inputs(*["hang"] * 3, *["one"] * 5))
        assert overall(pending.result()) == [None] * 8
        assert [line.partition("Error: ")[2] for line in pending.failures[2:4]] == [
            "no answer within 0.5 s", "not tried, 3 other responses had hung"
        ]  # fmt: skip
        assert overall(runner.submit(inputs("one")).result()) == [1]  # the next step starts afresh


def test_limits_of_time_by_default() -> None:
    assert RewardConfig().limit_s == RewardConfig(function={"math": 1.0, "format": 0.1}).limit_s == 1.0
    assert RewardConfig(function="mine.py:score").limit_s == 10.0
    assert RewardConfig(function={"math": 1.0, "rewards/mine.py": 1.0}).limit_s == 10.0
    assert RewardConfig(timeout_s=3.0).limit_s == 3.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": ""}, "reward.function is empty"),
        ({"function": {}}, "reward.function is empty"),
        ({"function": {"math": float("nan")}}, "the weight of 'math' must be finite"),
        (
            {"function": {"math": 1.0}, "kwargs": {"format_weight": 0.1}},
            r"holds a dict for each by name; .* \['math'\]",
        ),
        ({"timeout_s": 0.0}, "reward.timeout_s must be above 0"),
        ({"memory_mb": -1}, "reward.memory_mb must be at least 0"),
        ({"batch_size": 0}, "reward.batch_size must be at least 1"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


def test_R01_a_tower_of_powers_costs_itself_only() -> None:
    tower = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}"
    with RewardRunner(RewardConfig()) as runner:
        assert overall(runner.submit(inputs(tower, r"\boxed{42}")).result()) == [0.0, 0.9]


def test_R19_a_gold_answer_of_another_type_excludes_its_response() -> None:
    rows = [
        {**one, "ground_truth": gold}
        for one, gold in zip(inputs(*[r"\boxed{5}"] * 4), (5, 5.0, [5], None), strict=True)
    ]
    with RewardRunner(RewardConfig()) as runner:
        pending = runner.submit(rows)
        assert overall(pending.result()) == [0.9, 0.9, None, None]
        assert "ground_truth must be text or a number, got list [5]" in pending.failures[0]


def test_examples_of_the_readme_run(tmp_path: Path) -> None:
    checker = write(tmp_path, "my_checker.py", example("my_checker.py"))
    with RewardRunner(config(checker + ":compute_score", kwargs={"program": "test"}, timeout_s=20.0)) as runner:
        assert overall(runner.submit(inputs("text", "")).result()) == [1.0, 0.0]
    judge = write(tmp_path, "my_judge.py", example("my_judge.py"))
    with RewardRunner(
        config(judge + ":compute_score", kwargs={"url": "http://127.0.0.1:9/v1"}, timeout_s=20.0)
    ) as runner:
        pending = runner.submit(inputs("text"))
        assert pending.result() == [None] and "is None, not a finite number" in pending.failures[0]
