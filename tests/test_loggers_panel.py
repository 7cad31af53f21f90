"""The console: warnings that do not nag, and on a terminal a panel that keeps out of everybody's way."""

import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from r1.health import Trouble
from r1.loggers_console import Console
from r1.loggers_panel import Panel, clock, sparks
from tests.shell import ROOT, environment

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SICK = {"reward/mean": 0.0, "reward/failed_frac": 0.0, "reward/zero_std_frac": 1.0, "time/step_s": 2.0}


def test_a_warning_is_said_once_and_again_after_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("demo", None)
    for step in range(1, 41):
        console.log(step, SICK)
    warned = [
        step for step, text in enumerate(re.split(r"^step ", capsys.readouterr().out, flags=re.M)) if "warning" in text
    ]
    assert warned == [5, 25]  # 5 steps make a judgement; 20 later it is said again


def test_memory_of_a_long_run_is_bounded_and_keeps_its_first_steps() -> None:
    console = Console("demo", None)
    for step in range(1, 501):
        console.log(step, {"reward/mean": float(step), "time/step_s": 1.0})
    remembered = [metrics["reward/mean"] for metrics in console.history]
    assert len(remembered) == 60 and remembered[:10] == [float(i) for i in range(1, 11)] and remembered[-1] == 500


def test_panel_shows_trends_times_and_trouble() -> None:
    history = [
        {"reward/mean": i / 10, "time/step_s": 10.0, "time/rollout_s": 2.5, "time/update_s": 5.0} for i in range(8)
    ]
    trouble = Trouble("responses cut", "60% of responses", "Raise it")
    panel = Panel("demo", 8, 16, 80.0, history, {"val/held/accuracy": (0.4, 0.9)}, [trouble])
    text = panel.render(100, color=False)
    assert "demo: step 8 of 16" in text and " 50% " in text and "0:01:20 left, done at" in text
    assert "reward" in text and "0.700" in text and "▁▂▃▄▅▆▇█" in text
    assert "rollout 25%" in text and "update 50%" in text
    assert "val/held/accuracy  0.400 at first, 0.900 now" in text
    assert "responses cut: 60% of responses. Raise it" in text
    assert all(len(line) == 100 for line in text.splitlines())
    assert "\x1b" not in text


def test_a_trend_of_equal_values_is_flat() -> None:
    assert sparks([3.0, 3.0, 3.0]) == "▁▁▁"
    assert sparks([0.0, 1.0, 0.5]) == "▁█▅"


def test_the_end_of_a_long_run_is_told_with_its_day() -> None:
    assert re.fullmatch(r"\w{3} \d\d:\d\d", clock(3 * 86400.0))


SCRIPT = """
import logging, sys
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
from tqdm import tqdm
from r1.loggers_console import Console
console = Console("demo", 10)
for step in range(1, 4):
    for _ in tqdm(range(3), desc="update", leave=False, mininterval=0):
        pass
    console.log(step, {"reward/mean": step / 10, "time/step_s": 1.0})
    if step == 2:
        print("somebody's line")
        logging.getLogger("x").warning("a warning")
console.close()
assert sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
print("after")
"""


def on_a_terminal(script: str, **extra: str) -> str:
    """Run a script on a pseudo terminal of 100 columns; returns what it wrote."""
    leader, follower = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=follower, stdout=follower, stderr=follower, cwd=ROOT,
        env=environment(**extra),
    )  # fmt: skip
    os.close(follower)
    written = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux says so at the end of a terminal
            break
        if not part:
            break
        written += part
    os.close(leader)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def screen_of(written: str, rows: int = 40) -> list[str]:
    """The lines that a terminal shows: newline, return, cursor up and erase below are all that is used."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[(\d*)([A-Za-z])|(\r\n)|(\r)|(\n)|([^\x1b\r\n]+)", written.replace("\x1b[?25l", "")):
        count, code, crlf, cr, lf, text = piece
        if code == "A":
            row = max(0, row - int(count or 1))
        elif code == "J":
            lines[row:] = [lines[row][:column]]
        elif crlf or lf:
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif cr:
            column = 0
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
    return [line.rstrip() for line in lines]


def test_on_a_terminal_lines_stay_above_one_panel(tmp_path: Path) -> None:
    shown = screen_of(on_a_terminal(SCRIPT, TERM="xterm-256color"))
    assert [line[:9] for line in shown if line.startswith("step ")] == ["step 1/10", "step 2/10", "step 3/10"]
    assert "somebody's line" in shown and "WARNING a warning" in shown
    assert sum(line.startswith("╭─ demo: step") for line in shown) == 1, "\n".join(shown)
    assert "demo: step 3 of 10" in "\n".join(shown)
    order = [shown.index("somebody's line"), shown.index("WARNING a warning")]
    assert order == sorted(order) and shown[order[0] - 1].startswith("step 2/10")
    assert [line for line in shown if line][-1] == "after"


def test_a_dumb_terminal_gets_lines_alone() -> None:
    written = on_a_terminal(SCRIPT, TERM="dumb")
    assert "╭" not in written and "step 3/10" in written
