"""The work that a benchmark measures, and the files that a run of the real trainer needs to do it."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from PIL import Image

from r1.config import DataConfig, ModelConfig, UpdateConfig
from r1.data.prompt import Renderer
from r1.data.tokenizer import load_tokenizer
from tools.bench_model import SHAPES, make_model

CUT = 3.47
"""Mixed lengths are cut at this times their mean: 361 tokens on average, 1,253 at most."""
PATCHES = 28  # pixels of an image token's edge
STRETCH = (1.0, 1.25, 0.8, 1.5, 0.67)
"""Mixed pictures are this much wider than square, and as much lower, in turn."""

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
                    max_prompt_length={longest}, max_response_length={work.max_response_tokens},
                    min_pixels=784, max_pixels={max_pixels}),
    rollout=RolloutConfig(n={work.n}, ignore_eos={ignore_eos}),
    reward=RewardConfig(function={reward!r}),
    optim=OptimConfig(lr=1e-9),  # so small that the model goes on ending its responses as it was made to
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
    lengths: Literal["equal", "mixed"]  # of responses
    image: int | None  # edge of the square picture in each prompt, pixels
    minibatches: int  # optimizer steps a step
    precision: Literal["amp", "bf16", "float32"]
    steps: int  # the first is warm-up
    nproc: int  # GPUs
    prompt_lengths: Literal["equal", "mixed"] = "equal"  # mixed: half to one and a half times their text's mean
    image_sizes: Literal["equal", "mixed"] = "equal"  # mixed: of other shapes and about the same area

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

    def picture(self, row: int) -> tuple[int, int]:
        """(width, height) in pixels of a prompt's picture; (0, 0) without one."""
        if self.image is None:
            return 0, 0
        edge, stretch = self.image / PATCHES, STRETCH[row % len(STRETCH)] if self.image_sizes == "mixed" else 1.0
        return round(edge * stretch) * PATCHES, round(edge / stretch) * PATCHES

    @property
    def most_pixels(self) -> int:
        return max(math.prod(self.picture(row)) for row in range(len(STRETCH)))


def uncut_mean(mean: float, longest: int) -> float:
    """Mean of geometrically distributed lengths that have the given mean once they are cut at longest.

    Solves mean = m * (1 - (1 - 1 / m)^longest) for m, by iteration.
    """
    m = float(mean)
    for _ in range(100):
        m = mean / (1 - (1 - 1 / m) ** longest)
    return m


def response_lengths(work: Work, count: int) -> list[int]:
    """Lengths as the work's model samples them, without its luck: evenly spaced quantiles, in a fixed random order."""
    if work.lengths == "equal":
        return [work.response_tokens] * count
    longest = work.max_response_tokens
    going_on = math.log1p(-1 / uncut_mean(work.response_tokens, longest))  # log of P(a token is not the last)
    lengths = [math.ceil(math.log1p(-(i + 0.5) / count) / going_on) for i in range(count)]
    random.Random(0).shuffle(lengths)
    return [min(max(length, 1), longest) for length in lengths]


def model_of(work: Work, models: Path) -> Path:
    """The work's model below the folder `models`, made if it is not there; its name holds all that it depends on."""
    longest = round(CUT * work.response_tokens)
    folder = models / f"{work.model}-{work.response_tokens}"
    if not (folder / "model.safetensors.index.json").is_file():  # written last
        make_model(work.model, folder, mean_length=uncut_mean(work.response_tokens, longest))
    return folder


def write_rows(work: Work, model: Path, folder: Path) -> tuple[Path, int]:
    """rows.jsonl, and the pictures in it: other prompts for each step; and the tokens of the longest prompt.

    Raises:
        ValueError: the prompt is to be shorter than the chat template and the picture alone.
    """
    mark = "" if work.image is None else "<image>"
    data = DataConfig(min_pixels=784, max_pixels=max(work.most_pixels, 784))
    renderer = Renderer(data, *load_tokenizer(ModelConfig(path=str(model))), image_dir=folder)
    draw, count = random.Random(0), work.prompts * (work.steps + 1)
    shares = [1.0] * count
    if work.prompt_lengths == "mixed":
        shares = [0.5 + (i + 0.5) / count for i in range(count)]
        draw.shuffle(shares)
    _picture(work.picture(0), 0, folder / "0.png")
    probe = {"problem": mark + "x", "images": [] if work.image is None else ["0.png"]}
    around = renderer.length(probe) - 1  # tokens of chat template and picture
    if work.prompt_tokens <= around:
        raise ValueError(f"--prompt-tokens {work.prompt_tokens}: chat template and picture take {around} of them "
                         f"already; use at least {around + 1}")  # fmt: skip
    rows, lengths = [], []
    for i, share in enumerate(shares):
        letters = max(1, round((work.prompt_tokens - around) * share))  # one token each
        text = mark + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=letters))
        rows.append({"problem": text, "answer": str(i), "images": [] if work.image is None else [f"{i}.png"]})
        _picture(work.picture(i), i, folder / f"{i}.png")
        lengths.append(around + letters + (math.prod(work.picture(i)) - math.prod(work.picture(0))) // PATCHES**2)
    longest = lengths.index(max(lengths))
    assert renderer.length(rows[longest]) == lengths[longest], (renderer.length(rows[longest]), lengths[longest])
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, lengths[longest]


def _picture(size: tuple[int, int], seed: int, path: Path) -> None:
    """Coloured squares, 14 pixels wide: no two pictures are alike, and their files stay small. None of size (0, 0)."""
    width, height = size
    if width:
        generator = torch.Generator().manual_seed(seed)
        colors = torch.randint(256, (height // 14, width // 14, 3), generator=generator)
        small = Image.fromarray(colors.to(torch.uint8).numpy())
        small.resize(size, Image.Resampling.NEAREST).save(path)


def write_config(work: Work, model: Path, folder: Path) -> Path:
    """Rows, reward file and config.py of a run whose run folder is folder/run.

    The run would go on after the work: the trainer saves a checkpoint after its last step, 12 bytes a parameter, which
    is not what is measured. Whoever starts it ends it once the work is done.
    """
    (rows, longest), reward = write_rows(work, model, folder), folder / "reward.py"
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
        longest=longest,
        microbatch=max(UpdateConfig().max_tokens_per_microbatch, longest + work.max_response_tokens),
        max_pixels=max(work.most_pixels, 784),
        max_steps=work.steps + 1000,
    )
    config.write_text(text)
    return config
