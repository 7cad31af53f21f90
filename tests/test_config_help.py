"""--help: sections on one screen, a section on one, and every setting explained where it is written."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from r1.config import Config, TrainerConfig
from r1.config_help import help_text, topic_of
from tests import shell

SECTIONS = ("model", "data", "rollout", "reward", "algorithm", "optim", "update", "parallel", "checkpoint", "trainer")


def test_the_sections_fit_a_screen_and_so_does_each():
    for topic in (None, *SECTIONS):
        lines = help_text(Config(), topic).splitlines()
        assert len(lines) <= 50 and max(map(len, lines)) <= 120, topic
    overview = help_text(Config(), None)
    assert all(f"  {name} " in overview for name in SECTIONS)


def test_a_setting_comes_with_the_runs_value_and_its_meaning():
    config = Config(trainer=TrainerConfig(experiment_name="mine"))
    assert "--trainer.experiment_name 'mine'" in help_text(config, "trainer")
    assert help_text(config, "rollout.n") == "--rollout.n 5\n\nResponses per prompt: the group."
    assert "--rollout.val.n 1" in help_text(config, "rollout.val")
    whole = help_text(config, "data.overlong_prompts")
    assert whole.endswith("are never cut.") and "truncate_left" in whole


def test_an_unknown_topic_lists_the_sections():
    with pytest.raises(ValueError, match="--help rolout: there is no such setting; the sections are model, data"):
        help_text(Config(), "rolout")


def test_what_is_asked_is_read_from_the_words():
    assert topic_of(["--rollout.n", "8"]) == (False, None)
    assert topic_of(["--help"]) == (True, None) and topic_of(["--rollout.n", "8", "-h", "data"]) == (True, "data")
    assert topic_of(["--help", "--rollout.n", "8"]) == (True, None) and topic_of(["--help", "all"]) == (False, "all")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_the_settings_behind_the_launch_script(tmp_path: Path):
    config = str(shell.ROOT / "configs" / "geo3k.py")
    printed = shell.run(
        [sys.executable, "-m", "r1.train", "--config", config, "--tyro-print-completion", "bash"], tmp_path
    )
    (tmp_path / "r1.sh").write_text(printed.stdout)
    script = (
        "source r1.sh; f=$(complete -p single_node.sh | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
        "COMP_WORDS=(launch/single_node.sh --rollout.te); COMP_CWORD=1; $f; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() in (["--rollout.temperature", "--rollout.tensor-parallel-size"],
                                   ["--rollout.tensor-parallel-size", "--rollout.temperature"]), done  # fmt: skip
