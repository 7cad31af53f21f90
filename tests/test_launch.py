"""The launch scripts, on loopback: several "hosts" of one or two ranks that add their ranks up."""

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.tiny import make_tiny

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
TIMEOUT_S = 120

# Stands in for r1.train: proves the world is complete, and that arguments arrive.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
if "--fail" in sys.argv and dist.get_rank() == 0:
    sys.exit("rank 0 was told to fail")
if "--stop" in sys.argv:
    open(os.environ["R1_STOP_FILE"], "w").close()
dist.barrier()  # with --fail the others wait here for rank 0, as trainers do in a collective
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: sum {total.item()}, got {sys.argv[1:]}", flush=True)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A host's environment: torchrun on PATH, PROGRAM importable as probe."""
    (tmp_path / "probe.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    own = {"R1_MODULE": "probe", "PYTHONPATH": str(tmp_path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return {**kept, **own, "PATH": path}


def start(command: list[str | Path], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(c) for c in command],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that finish() ends what the script started, too
    )


def finish(process: subprocess.Popen[str], *, ok: bool = True) -> str:
    """Output of a process that must end in time, well or (ok=False) badly; nothing it started outlives the call."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode == 0) == ok, output
    return output


def write_tool(path: Path, text: str) -> None:
    path.write_text("#!/usr/bin/env bash\nset -eu\n" + text)
    path.chmod(0o755)


@pytest.mark.dist
def test_single_node_starts_a_rank_per_process(env: dict[str, str], tmp_path: Path) -> None:
    output = finish(start([LAUNCH / "single_node.sh", "--config", "a b.py"], {**env, "NPROC_PER_NODE": "2"}, tmp_path))
    assert "rank 0 of 2: sum 3, got ['--config', 'a b.py']" in output
    assert "rank 1 of 2: sum 3" in output


@pytest.mark.dist
def test_two_nodes_meet_and_form_one_world(env: dict[str, str], tmp_path: Path) -> None:
    env |= {"NNODES": "2", "NPROC_PER_NODE": "1", "HEAD": f"localhost:{free_port()}"}
    nodes = [start([LAUNCH / "multi_node.sh", "--seed", "7"], env, tmp_path) for _ in range(2)]
    output = "".join(finish(node) for node in nodes)
    assert "rank 0 of 2: sum 3, got ['--seed', '7']" in output
    assert "rank 1 of 2: sum 3, got ['--seed', '7']" in output


@pytest.mark.parametrize("missing", ["NNODES", "HEAD"])
def test_multi_node_names_the_missing_setting(missing: str, env: dict[str, str], tmp_path: Path) -> None:
    env |= {"NNODES": "2", "HEAD": "localhost:1"}
    del env[missing]
    done = subprocess.run(
        [LAUNCH / "multi_node.sh"], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert missing in done.stderr


def slurm(env: dict[str, str], tmp_path: Path, *args: str) -> subprocess.Popen[str]:
    """Run a copy of the sbatch file as Slurm does, with an srun that starts one task a "host"."""
    write_tool(
        tmp_path / "bin" / "scontrol",
        f'[ "$1" = requeue ] && echo "$@" > {tmp_path}/requeued && exit\n'
        '[ "$*" = "show hostnames nodes[1-2]" ]\necho localhost\necho other\n',
    )
    write_tool(
        tmp_path / "bin" / "srun",
        # As srun: options first, then the command once per host; the first failure ends the others.
        f'echo "$@" > {tmp_path}/srun_words\n'
        'while [[ $1 == --* ]]; do [[ $1 == --chdir=* ]] && cd "${1#--chdir=}"; shift; done\n'
        '"$@" & "$@" &\nstatus=0\nwait -n || status=$?\n'
        "[ $status != 0 ] || wait -n || status=$?\n[ $status = 0 ] || kill $(jobs -p) || true\nwait\n"
        "exit ${SRUN_CODE:-$status}\n",
    )
    spooled = tmp_path / "spool" / "slurm_script"
    spooled.parent.mkdir()
    spooled.write_text((LAUNCH / "slurm.sbatch").read_text())
    job = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "nodes[1-2]",
        "SLURM_JOB_ID": env.setdefault("SLURM_JOB_ID", str(free_port())),  # the port is made of it: runs stay apart
        "SLURM_SUBMIT_DIR": str(ROOT),
        "NPROC_PER_NODE": "1",
    }
    return start(["bash", spooled, *args], {**env, **job}, tmp_path)


@pytest.mark.dist
def test_slurm_starts_one_torchrun_a_node(env: dict[str, str], tmp_path: Path) -> None:
    output = finish(slurm(env, tmp_path, "--config", "configs/geo3k.py"))
    assert "rank 0 of 2: sum 3, got ['--config', 'configs/geo3k.py']" in output
    assert "rank 1 of 2: sum 3" in output


@pytest.mark.dist
@pytest.mark.parametrize("killed", ["", "137"])
def test_slurm_job_that_saved_and_stopped_goes_back_into_the_queue(
    env: dict[str, str], tmp_path: Path, killed: str
) -> None:
    # srun ends the other hosts when one ends with 75, and its own code may be that of a host it killed.
    env["SRUN_CODE"] = killed
    job = slurm(env, tmp_path, "--stop")
    output, _ = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 75, output
    assert f"saved and stopped: job {env['SLURM_JOB_ID']} goes back into the queue" in output
    assert (tmp_path / "requeued").read_text() == f"requeue {env['SLURM_JOB_ID']}\n"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("team/r1:latest", f"--container-image=team/r1:latest --container-mounts={ROOT}:{ROOT},/data:/data"),
        ("/images/r1.sif", f"apptainer exec --nv --bind {ROOT}:{ROOT},/data:/data --pwd {ROOT} /images/r1.sif bash"),
    ],
)
def test_slurm_runs_inside_an_image(image: str, words: str, env: dict[str, str], tmp_path: Path) -> None:
    write_tool(tmp_path / "bin" / "apptainer", 'while [ "$1" != bash ]; do shift; done\nexec "$@"\n')
    settings = {"CONTAINER": image, "CONTAINER_MOUNTS": "/data:/data", "VENV": str(tmp_path)}
    assert "rank 1 of 2: sum 3" in finish(slurm({**env, **settings}, tmp_path))
    assert words in (tmp_path / "srun_words").read_text()


@pytest.mark.dist
def test_ssh_starts_a_torchrun_on_each_host_and_ends_all_when_one_fails(env: dict[str, str], tmp_path: Path) -> None:
    write_tool(
        tmp_path / "bin" / "remote", 'exec bash -c "$2"\n'
    )  # as ssh: a host, then one word, run by a shell there
    (tmp_path / "launch").symlink_to(LAUNCH)
    env |= {"HOSTS": "localhost localhost", "NPROC_PER_NODE": "1", "SSH": "remote"}
    output = finish(start([LAUNCH / "ssh.sh", "--a b", "c"], {**env, "PORT": str(free_port())}, tmp_path))
    assert "localhost: rank 0 of 2: sum 3, got ['--a b', 'c']" in output
    assert "localhost: rank 1 of 2: sum 3" in output
    failed = finish(start([LAUNCH / "ssh.sh", "--fail"], {**env, "PORT": str(free_port())}, tmp_path), ok=False)
    assert "rank 0 was told to fail" in failed


def test_manifests_name_scripts_and_configs_that_are_there() -> None:
    for name in ("kubeflow.yaml", "skypilot.yaml"):
        text = (LAUNCH / name).read_text()
        assert yaml.safe_load(text)
        for path in re.findall(r"\b(?:launch|configs)/[\w.]+\.(?:sh|py)\b", text):
            assert (ROOT / path).exists(), f"{name} names {path}"


TRAINING = """
from r1.config import *

HERE = {here!r}
config = Config(
    model=ModelConfig(path=HERE + "/model", precision="float32"),
    data=DataConfig(train_files=HERE + "/a.jsonl", val_files=(), max_prompt_length=64, max_response_length=6,
                    rollout_batch_size=4, num_workers=1),
    rollout=RolloutConfig(n=2, engine="hf"),
    reward=RewardConfig(function="format", num_workers=1),
    update=UpdateConfig(global_batch_size=4, max_tokens_per_microbatch=256),
    trainer=TrainerConfig(output_dir=HERE + "/runs", max_steps=2, progress=False, loggers=("console", "file")),
)
"""


@pytest.mark.dist
def test_the_readmes_line_trains_on_two_loopback_nodes(env: dict[str, str], tmp_path: Path) -> None:
    make_tiny("qwen2", tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(f'{{"problem": "{i} + 1?", "answer": "{i + 1}"}}\n' for i in range(8)))
    (tmp_path / "config.py").write_text(TRAINING.format(here=str(tmp_path)))
    match = re.search(
        r"^    (NNODES=2 NPROC_PER_NODE=1 HEAD=localhost:29500 .*)$", (ROOT / "README.md").read_text(), re.M
    )
    assert match, "the README shows no line for two nodes on one machine"
    line = match[1].replace("29500", str(free_port())).replace("configs/demo.py", str(tmp_path / "config.py"))
    assert str(tmp_path) in line
    env = {**env, "R1_MODULE": "r1.train", "PYTHONPATH": str(ROOT)}
    nodes = [start(["bash", "-c", line], env, ROOT) for _ in range(2)]
    output = "".join(finish(node) for node in nodes)
    rows = [json.loads(row) for row in (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and output.count("done in") == 1
    assert (tmp_path / "runs" / "demo" / "checkpoints" / "step_000002").is_dir()


@pytest.mark.dist
def test_slurm_job_fails_when_a_rank_fails(env: dict[str, str], tmp_path: Path) -> None:
    assert "rank 0 was told to fail" in finish(slurm(env, tmp_path, "--fail"), ok=False)


@pytest.mark.parametrize(("code", "said"), [(-signal.SIGABRT, True), (1, False), (-signal.SIGKILL, False)])
def test_ranks_that_nccls_watchdog_aborted_get_a_hint(code: int, said: bool, tmp_path: Path) -> None:
    launcher = runpy.run_path(str(LAUNCH / "torchrun.py"))
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file=str(tmp_path / "none"))
        for rank in (0, 3)
    }
    line = launcher["hint"](ChildFailedError("r1.train", failures))
    assert bool(line) == said
    if said:
        assert line.startswith("hint: ranks [0, 3] were aborted") and "/tmp/r1_nccl_rank_<rank>" in line
