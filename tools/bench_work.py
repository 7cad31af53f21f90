"""The work that a benchmark measures, and the files that a run of the real trainer needs to do it."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image

from r1.config import DataConfig, ModelConfig
from r1.data.prompt import Renderer
from r1.data.tokenizer import load_tokenizer
from tools.bench_model import SHAPES, make_model

CUT = 3.47
"""Mixed lengths are cut at this times their mean: 361 tokens on average, 1,253 at most."""
PATCHES = 28  # pixels of an image token's edge

REWARD = '''"""A reward that differs between responses, so that every group teaches something."""

REWARD_NAME, REWARD_TYPE = "bench", "batch"


def compute_score(reward_inputs, **_):
    return [{"overall": x["response"].count("e") / max(len(x["response"]), 1)} for x in reward_inputs]
'''

CONFIG = '''"""Written by tools/bench.py: one benchmark run."""

from r1.config import *

config = Config(
    model=ModelConfig(path={model!r}, precision={work.precision!r}),
    data=DataConfig(train_files={rows!r}, val_files=(), rollout_batch_size={work.prompts},
                    max_prompt_length={work.prompt_tokens}, max_response_length={work.max_response_tokens},
                    min_pixels=784, max_pixels={max_pixels}),
    rollout=RolloutConfig(n={work.n}, ignore_eos={ignore_eos}),
    reward=RewardConfig(function={reward!r}),
    update=UpdateConfig(global_batch_size={minibatch}, max_tokens_per_microbatch={microbatch}),
    checkpoint=CheckpointConfig(resume=False),
    trainer=TrainerConfig(output_dir={folder!r}, experiment_name="run", max_steps={max_steps}, progress=False,
                          val_before_train=False, loggers=("console", "file")),
)
'''


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one step does, and on what; the same for every way of doing it."""

    model: str  # one of SHAPES
    prompts: int  # per step, over all GPUs
    n: int  # responses per prompt
    prompt_tokens: int  # of each prompt, its picture's included
    response_tokens: int  # mean
    lengths: Literal["equal", "mixed"]
    image: int | None  # edge of the square picture in each prompt, pixels
    minibatches: int  # optimizer steps a step
    precision: Literal["amp", "bf16", "float32"]
    steps: int  # the first is warm-up
    nproc: int  # GPUs

    def __post_init__(self) -> None:
        if self.model not in SHAPES:
            raise ValueError(f"--model {self.model}: there is no such shape; use one of {', '.join(SHAPES)}")
        if self.steps < 2:
            raise ValueError(f"--steps {self.steps}: the first step is warm-up and not counted; use at least 2")
        if self.prompts % self.minibatches:
            raise ValueError(f"--prompts {self.prompts} does not divide into --minibatches {self.minibatches}")
        if self.response_tokens < 4:
            raise ValueError(f"--response-tokens {self.response_tokens}: use at least 4")
        sees = SHAPES[self.model].vision is not None
        if sees != (self.image is not None):
            raise ValueError(f"--image is for the models that see, and they need it; got {self.image} for {self.model}")
        if self.image is not None and (self.image < 2 * PATCHES or self.image % PATCHES):
            raise ValueError(f"--image {self.image}: use a multiple of {PATCHES} pixels, 56 or more")

    @property
    def max_response_tokens(self) -> int:
        return self.response_tokens if self.lengths == "equal" else round(CUT * self.response_tokens)

    @property
    def image_tokens(self) -> int:
        return 0 if self.image is None else (self.image // PATCHES) ** 2


def uncut_mean(mean: float, longest: int) -> float:
    """Mean of geometrically distributed lengths that have the given mean once they are cut at longest.

    Solves mean = m * (1 - (1 - 1 / m)^longest) for m, by iteration.
    """
    m = float(mean)
    for _ in range(100):
        m = mean / (1 - (1 - 1 / m) ** longest)
    return m


def model_of(work: Work, models: Path) -> Path:
    """The work's model below the folder `models`, made if it is not there; its name holds all that it depends on."""
    longest = round(CUT * work.response_tokens)
    folder = models / f"{work.model}-{work.response_tokens}"
    if not (folder / "model.safetensors.index.json").is_file():  # written last
        make_model(work.model, folder, mean_length=uncut_mean(work.response_tokens, longest))
    return folder


def write_rows(work: Work, model: Path, folder: Path) -> Path:
    """rows.jsonl, and the pictures in it: other prompts of the asked length for each step.

    Raises:
        ValueError: the prompt is to be shorter than the chat template and the picture alone.
    """
    mark = "" if work.image is None else "<image>"
    data = DataConfig(min_pixels=784, max_pixels=(work.image or 512) ** 2)
    renderer = Renderer(data, *load_tokenizer(ModelConfig(path=str(model))), image_dir=folder)
    draw = random.Random(0)
    rows = []
    for i in range(work.prompts * (work.steps + 1)):
        rows.append({"problem": mark, "answer": str(i), "images": [] if work.image is None else [f"{i}.png"]})
        if work.image is not None:
            _picture(work.image, i).save(folder / f"{i}.png")
    rows[0]["problem"] = mark + "x"
    letters = work.prompt_tokens - renderer.length(rows[0]) + 1  # one token each
    if letters < 1:
        least = work.prompt_tokens - letters + 1
        raise ValueError(f"--prompt-tokens {work.prompt_tokens}: chat template and picture take {least - 1} of them "
                         f"already; use at least {least}")  # fmt: skip
    for row in rows:
        row["problem"] = mark + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=letters))
    assert renderer.length(rows[-1]) == work.prompt_tokens, renderer.length(rows[-1])
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _picture(edge: int, seed: int) -> Image.Image:
    """Coloured squares, 14 pixels wide: no two pictures are alike, and their files stay small."""
    colors = torch.randint(256, (edge // 14, edge // 14, 3), generator=torch.Generator().manual_seed(seed))
    small = Image.fromarray(colors.to(torch.uint8).numpy())
    return small.resize((edge, edge), Image.Resampling.NEAREST)


def write_config(work: Work, model: Path, folder: Path) -> Path:
    """Rows, reward file and config.py of a run whose run folder is folder/run.

    The run would go on after the work: the trainer saves a checkpoint after its last step, 12 bytes a parameter, which
    is not what is measured. Whoever starts it ends it once the work is done.
    """
    rows, reward = write_rows(work, model, folder), folder / "reward.py"
    reward.write_text(REWARD)
    config = folder / "config.py"
    text = CONFIG.format(
        work=work,
        model=str(model),
        rows=str(rows),
        reward=f"{reward}:compute_score",
        folder=str(folder),
        ignore_eos=work.lengths == "equal",
        minibatch=work.prompts // work.minibatches,
        microbatch=max(16384, work.prompt_tokens + work.max_response_tokens),
        max_pixels=(work.image or 512) ** 2,
        max_steps=work.steps + 1000,
    )
    config.write_text(text)
    return config
