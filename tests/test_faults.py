"""What ends a run: kills at any moment, signals, deadlines, hung collectives, full disks; and how it goes on."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from r1.faults import hint, is_out_of_memory, out_of_memory
from r1.preempt import STOPPED
from tests import shell
from tests.tiny import make_tiny

LAUNCH = shell.ROOT / "launch" / "single_node.sh"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen2", tmp_path_factory.mktemp("faults") / "model", tie=True)


def options(model: Path, folder: Path, **more: object) -> str:
    return json.dumps({"model": str(model), "folder": str(folder), "steps": 10} | more)


def journal(folder: Path) -> list[tuple[int, str]]:
    """(step, digest of the weights after it) in the order they were written."""
    lines = folder.with_suffix(".txt").read_text().split("\n") if folder.with_suffix(".txt").exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if line]


def kills(model: Path, folder: Path, count: int, **more: object) -> dict:
    """The run of tests/dist/life.py through so many kills, in a seeded random manner."""
    command = [sys.executable, "-m", "tests.dist.kills", options(model, folder, **more), str(count), "7"]
    done = subprocess.run(
        command, cwd=shell.ROOT, env=shell.environment(), capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def start(words: list[str], folder: Path, **extra: str) -> subprocess.Popen[str]:
    own = {"R1_MODULE": "tests.dist.life", "NPROC_PER_NODE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    env = shell.environment(**own | extra)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for_step(job: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and step not in [s for s, _ in journal(folder)]:
        assert job.poll() is None, job.communicate()[0][-3000:]
        time.sleep(0.05)


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks, in order."""
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(job.pid)], capture_output=True, text=True, check=True)
    found = []
    for pid in listing.stdout.split():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found += [(int(v[5:]), int(pid)) for v in environ if v.startswith(b"RANK=")]
    return [pid for _, pid in sorted(found)]


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """{step: digest of the weights} of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert kills(model, folder, 0)["statuses"] == [0, 0]
    assert [step for step, _ in journal(folder)] == list(range(1, 11))
    return dict(journal(folder))


def assert_exact(folder: Path, expected: dict[int, str]) -> None:
    """Whatever was done, and done again after a kill, gave the undisturbed run's weights; and it came to the end.

    Its log has every step once, in order.
    """
    lines = journal(folder)
    assert [step for step, value in lines if value != expected[step]] == []
    assert {step for step, _ in lines} == set(expected)
    logged = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert logged == sorted(expected)


@pytest.mark.dist
def test_C09_three_kills_at_random_moments_resume_exactly(model, tmp_path, straight):
    done = kills(model, tmp_path / "run", 3)
    assert done["statuses"] == [0, 0] and done["slowest_s"] < 30
    assert_exact(tmp_path / "run", straight)


@pytest.mark.slow
@pytest.mark.dist
def test_C09_fifty_kills_resume_exactly(model, tmp_path):
    assert kills(model, tmp_path / "straight", 0, steps=150)["statuses"] == [0, 0]
    done = kills(model, tmp_path / "run", 50, steps=150)
    print(done)
    assert done["statuses"] == [0, 0] and done["slowest_s"] < 30
    assert done["half_written"] > 5  # it did hit saves
    assert_exact(tmp_path / "run", dict(journal(tmp_path / "straight")))


@pytest.mark.dist
@pytest.mark.parametrize("launcher", ["launch", "torchrun"])
def test_torchrun_starts_a_killed_run_again_and_it_resumes_by_itself(model, tmp_path, straight, launcher):
    words, extra = [str(LAUNCH)], {"MAX_RESTARTS": "1"}
    if launcher == "torchrun":
        words, extra = shell.torchrun("tests.dist.life", ranks=2), {}
        words.insert(words.index("--standalone"), "--max-restarts=1")
    job = start([*words, options(model, tmp_path / "run", step_s=0.2)], tmp_path, **extra)
    wait_for_step(job, tmp_path / "run", 4)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output[-3000:]
    assert_exact(tmp_path / "run", straight)
    again = [step for step, _ in journal(tmp_path / "run")]
    assert len(again) <= 10 + 3  # from the latest checkpoint, not from the start


@pytest.mark.dist
def test_ranks_of_two_hosts_start_again_when_one_is_killed(model, tmp_path, straight):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        head = f"localhost:{probe.getsockname()[1]}"
    extra = {"NNODES": "2", "HEAD": head, "NPROC_PER_NODE": "1", "MAX_RESTARTS": "2"}
    words = [str(LAUNCH.with_name("multi_node.sh")), options(model, tmp_path / "run", step_s=0.3)]
    hosts = [start(words, tmp_path, **extra) for _ in range(2)]
    wait_for_step(hosts[0], tmp_path / "run", 4)
    os.kill(ranks_of(hosts[1])[0], signal.SIGKILL)
    outputs = [host.communicate(timeout=120)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], "\n".join(output[-2000:] for output in outputs)
    assert_exact(tmp_path / "run", straight)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "to_ranks"),
    [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGUSR1, True), (signal.SIGUSR1, False)],
)
def test_a_signal_saves_and_ends_with_75_and_the_same_command_goes_on(model, tmp_path, straight, number, to_ranks):
    folder = tmp_path / "run"
    words = [str(LAUNCH), options(model, folder, step_s=0.3)]
    job = start(words, tmp_path)
    wait_for_step(job, folder, 2)
    # Slurm signals the process it started (proctrack/cgroup), or every process of the job.
    for pid in [job.pid, *ranks_of(job)] if to_ranks else [job.pid]:
        os.kill(pid, number)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == STOPPED == 75, output[-3000:]
    assert f"{number.name}: the run saves and stops after this step" in output
    last = journal(folder)[-1][0]
    assert last < 10 and (folder / f"checkpoints/step_{last:06d}/complete.json").exists()
    second = start(words, tmp_path)
    output, _ = second.communicate(timeout=90)
    assert second.returncode == 0, output[-3000:]
    assert [step for step, _ in journal(folder)] == list(range(1, 11))  # no step twice
    assert_exact(folder, straight)


@pytest.mark.dist
def test_one_rank_that_gets_the_signal_stops_all(model, tmp_path):
    folder = tmp_path / "run"
    job = start([str(LAUNCH), options(model, folder, step_s=0.3)], tmp_path)
    wait_for_step(job, folder, 2)
    os.kill(ranks_of(job)[1], signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == STOPPED, output[-3000:]
    assert journal(folder)[-1][0] < 10


@pytest.mark.dist
def test_deadline_ends_before_its_time_with_75(model, tmp_path):
    folder = tmp_path / "run"
    job = start([str(LAUNCH), options(model, folder, step_s=1, steps=100, checkpoint={"deadline": "20s"})], tmp_path)
    began = time.monotonic()
    output, _ = job.communicate(timeout=90)
    assert job.returncode == STOPPED, output[-3000:]
    last = journal(folder)[-1][0]
    assert 1 <= last < 20 and (folder / f"checkpoints/step_{last:06d}/complete.json").exists()
    assert time.monotonic() - began < 30


@pytest.mark.dist
def test_a_hung_collective_ends_with_a_hint(model, tmp_path):
    words = [str(LAUNCH), options(model, tmp_path / "run", hang=[3, 1], timeout_s=5.0)]
    job = start(words, tmp_path)
    wait_for_step(job, tmp_path / "run", 2)
    began = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert job.returncode not in (0, STOPPED) and time.monotonic() - began < 30
    assert "hint: this rank waited parallel.timeout_s for the others in a collective" in output
    assert "py-spy dump" in output
    # The rank that hangs says where.
    assert re.search(r"so rank 1 does; it was at .* > life.py:\d+ live\n", output), output[-3000:]


@pytest.mark.dist
def test_a_microbatch_that_does_not_fit_ends_all_ranks_with_its_sizes(model, tmp_path):
    job = start([str(LAUNCH), options(model, tmp_path / "run", oom=[3, 1])], tmp_path)
    wait_for_step(job, tmp_path / "run", 2)
    began = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert job.returncode not in (0, STOPPED) and time.monotonic() - began < 30
    said = re.search(
        r"out of memory in a microbatch of tokens (\d+), responses (\d+), patches 0: CUDA out of mem", output
    )
    assert said is not None and int(said[1]) > 10 and 1 <= int(said[2]) <= 6, output[-3000:]
    assert "lower update.max_tokens_per_microbatch" in output
    assert {step for step, _ in journal(tmp_path / "run")} == {1, 2}


@pytest.mark.dist
def test_a_full_disk_is_loud_and_training_goes_on_and_saves_again(model, tmp_path, straight):
    folder = tmp_path / "run"
    settings = {"save_limit": -1, "asynchronous": False}  # a write under way would outlast the step
    job = start([str(LAUNCH), options(model, folder, full=[4, 7], checkpoint=settings)], tmp_path)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output[-3000:]
    assert_exact(folder, straight)
    for step in range(1, 11):
        path = folder / f"checkpoints/step_{step:06d}"
        assert (path / "complete.json").exists() == (step not in (4, 5, 6)), (step, output[-3000:])
        assert path.exists() == (step not in (4, 5, 6))  # what was half written gives its room back
        said = f"step_{step:06d} could not be saved" in output
        assert said == (step in (4, 5, 6))
    assert output.count("NOT SAVED") == 3 and "training goes on" in output


@pytest.mark.dist
def test_a_final_save_that_fails_is_an_error_exit(model, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").write_text("a file is where the folder should be")
    job = start([str(LAUNCH), options(model, tmp_path / "run", steps=2)], tmp_path)
    output, _ = job.communicate(timeout=90)
    assert job.returncode not in (0, STOPPED)
    assert [step for step, _ in journal(tmp_path / "run")] == [1, 2]  # the first failure did not end it
    assert "NOT SAVED" in output and "training goes on" in output
    assert "step_000002 could not be saved (rank 0:" in output


@pytest.mark.slow
@pytest.mark.dist
def test_host_memory_is_flat_over_200_steps(model, tmp_path):
    folder = tmp_path / "run"
    assert kills(model, folder, 0, steps=200, checkpoint={"save_limit": 2})["statuses"] == [0, 0]
    sizes = [int(line.split()[2]) for line in folder.with_suffix(".txt").read_text().splitlines()]
    early, late = sorted(sizes[20:60])[20], sorted(sizes[160:])[20]  # medians
    print(f"resident MiB: {early / 2**20:.0f} at step 40, {late / 2**20:.0f} at step 180")
    assert late < early + 10 * 2**20


def test_out_of_memory_says_the_sizes_and_what_to_lower():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert is_out_of_memory(caught.value) and is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    text = str(out_of_memory(caught.value, {"tokens": 16384, "responses": 12, "images": 3}))
    assert text.startswith("out of memory in a microbatch of tokens 16384, responses 12, images 3: ")
    assert "lower update.max_tokens_per_microbatch" in text


@pytest.mark.parametrize(
    ("message", "begins"),
    [
        (
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation",
            "hint: this rank waited",
        ),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "hint: this rank waited"),
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:11164", "hint: another rank ended"),
        ("mat1 and mat2 shapes cannot be multiplied", ""),
    ],
)
def test_hint_for_a_collective_only(message: str, begins: str) -> None:
    line = hint(RuntimeError(message))
    assert line.startswith(begins) and bool(line) == bool(begins)


def test_a_removed_data_file_does_not_matter_once_its_rows_are_loaded(tmp_path):
    from r1.data.rows import load_rows

    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i}", "answer": i}) + "\n" for i in range(64)))
    rows = load_rows(str(path))
    path.unlink()
    assert [rows[i]["problem"] for i in (0, 63)] == ["0", "63"]
    with pytest.raises(ValueError, match=r"train\.jsonl"):
        load_rows(str(path))
