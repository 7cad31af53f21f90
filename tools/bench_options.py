"""Options that say what work a benchmark measures; `step`, `parts` and `trl` share them, so that they do the same."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tools.bench_model import SHAPES
from tools.bench_work import CUT, Work

# Sizes that two CPU cores do in a minute.
SMALL = {"prompts": 8, "n": 4, "prompt_tokens": 64, "response_tokens": 32, "image": 56, "minibatches": 2,
         "precision": "float32"}  # fmt: skip
FULL = {"prompts": 64, "n": 5, "prompt_tokens": 343, "response_tokens": 361, "image": 504, "minibatches": 4,
        "precision": "amp"}  # fmt: skip
PICTURE_TEXT = 102
"""Text tokens beside a 504 x 504 picture's 324, in geometry3k's prompts of 426 tokens."""
SPREADS = ("lengths", "prompt_lengths", "image_sizes")
PRESETS = {"fixed": dict.fromkeys(SPREADS, "equal"), "geo3k": dict.fromkeys(SPREADS, "mixed")}
"""geo3k: as prompts, pictures and answers of geometry3k vary, at the sizes of a model that sees."""


def add_work_options(parser: argparse.ArgumentParser, *, scales: bool = False) -> None:
    """Model, sizes and precision; where files lie and how many ranks there are.

    scales: for `scale`, whose --model may be several, --prompts are of each GPU, and --nproc the most GPUs of a run.
    """

    def sized(option: str, text: str) -> None:
        name = option[2:].replace("-", "_")
        parser.add_argument(option, type=int, help=f"{text} (default {FULL[name]}; tiny models {SMALL[name]})")

    default = "several with commas, each with :precision if not --precision; 3b, vl-3b, 7b:bf16" if scales else "0.5b"
    parser.add_argument("--model", help=f"{', '.join(SHAPES)} (default on a GPU {default}, on a CPU tiny)")
    sized("--prompts", f"prompts a step, {'of each GPU' if scales else 'over all GPUs'}")
    sized("--n", "responses to each prompt")
    sized("--prompt-tokens", "tokens of a prompt, its picture's included; with a picture its own + 102")
    sized("--response-tokens", "tokens of a response, on average")
    spreads = {
        "--lengths": f"of responses; mixed: each token may be the last, and all end at {CUT} times the mean",
        "--prompt-lengths": "mixed: half to one and a half times the mean of their text",
        "--image-sizes": "mixed: of other shapes and about the same area",
    }
    for option, text in spreads.items():
        parser.add_argument(option, choices=("equal", "mixed"), help=f"{text} (default equal)")
    preset = "the three above at once: fixed, or geo3k (mixed, by default with a model that sees)"
    parser.add_argument("--preset", choices=tuple(PRESETS), default="fixed", help=preset)
    sized("--image", "pixels of the edge of each prompt's picture, for models that see")
    sized("--minibatches", "optimizer steps a step")
    precision = f"model.precision (default {FULL['precision']}; tiny models {SMALL['precision']})"
    parser.add_argument("--precision", choices=("amp", "bf16", "float32"), help=precision)
    text = "runs on 1, 2, 4 … up to so many (default all)" if scales else "one run on so many (default 1)"
    number = None if scales else 1
    parser.add_argument("--nproc", type=int, default=number, help=f"GPUs of this machine, or ranks on a CPU: {text}")
    output = "folder for the results, the config and logs (default runs/bench)"
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help=output)
    kept = "folder to keep random models in and take them from, up to 17 GB each (default: a temporary one)"
    parser.add_argument("--models", type=Path, help=kept)


def work_of(options: argparse.Namespace, *, steps: int) -> Work:
    """The work that the options ask for, their defaults those of the model's size.

    Raises:
        ValueError: options that do not fit each other.
    """
    small, large = ("tiny-vl", "qwen2.5-vl-3b") if options.preset == "geo3k" else ("tiny", "qwen2.5-0.5b")
    model = options.model or (large if torch.cuda.is_available() else small)
    defaults = SMALL if model.startswith("tiny") else FULL
    chosen = {name: value if (given := getattr(options, name)) is None else given for name, value in defaults.items()}
    sees = model in SHAPES and SHAPES[model].vision is not None
    if not sees:
        chosen["image"] = options.image
    elif options.prompt_tokens is None:
        chosen["prompt_tokens"] = PICTURE_TEXT + (chosen["image"] // 28) ** 2
    spreads = {name: getattr(options, name) or value for name, value in PRESETS[options.preset].items()}
    return Work(model=model, **chosen, **spreads, steps=steps, nproc=options.nproc)


def output_folder(options: argparse.Namespace) -> Path:
    """The folder of --output, made."""
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def models_folder(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of --models; without it one that is gone in the end."""
    if options.models is not None:
        yield options.models.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="r1-bench-") as temporary:
        yield Path(temporary)
