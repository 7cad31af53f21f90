"""Read every row of a run's data, or of files: what is wrong with which, how long prompts are, what is filtered.

    python tools/check_data.py --config configs/geo3k.py [--data.max_prompt_length 1024 …] [--html data.html]
    python tools/check_data.py train.jsonl val.parquet [--model Qwen/Qwen2.5-VL-7B-Instruct] [--prompt-key question …]

Exit status: 0, every row can be used; 1, some row or file cannot; 2, the command or config is wrong.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from r1.config import DataConfig, ModelConfig, load_config
from r1.data.faults import RowError
from r1.data.mixture import Mixture
from r1.data.prompt import Measured, Renderer
from r1.data.scan import OVERLONG, judge, measure_rows, renderers_by_folder
from r1.data.sources import as_sources
from r1.data.tokenizer import load_tokenizer
from tools.check_data_html import write_html
from tools.check_data_report import text_report
from tools.check_data_stand_in import stand_in

CHUNK = 256  # rows between two moves of the progress bar
NO_LIMIT = 10**9


@dataclass(kw_only=True)
class Checked:
    """One data set and what was found in it; rows are named by their positions."""

    title: str
    rows: Mixture | None = None  # None: it could not be read
    error: str = ""  # why
    unit: str = "tokens"  # of lengths
    lengths: list[int] = field(default_factory=list)  # of the rows that can be used or are too long
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (width, height) of every image
    images: list[int] = field(default_factory=list)  # in each such row
    image_tokens: list[int] = field(default_factory=list)  # of every image
    frames: list[int] = field(default_factory=list)  # taken of every video
    video_tokens: list[int] = field(default_factory=list)  # of every video
    faults: list[tuple[int, RowError]] = field(default_factory=list)
    overlong: list[tuple[int, RowError]] = field(default_factory=list)  # would be filtered, or cut
    notes: list[tuple[int, RowError]] = field(default_factory=list)  # used as they are, but worth a look
    examples: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)  # (row, prompt as rendered, columns)
    renderers: dict[Path | None, Renderer] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.error and not self.faults


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the rows are checked against."""

    data: DataConfig
    renderer: Renderer
    limit_images: int
    limit_videos: int
    unit: str


def check_set(title: str, sources: str | Sequence[str], setup: Setup, pool: ThreadPoolExecutor) -> Checked:
    """Read and measure all rows of a data set, every image decoded whole."""
    checked = Checked(title=title, unit=setup.unit)
    try:
        rows = checked.rows = Mixture(as_sources(sources), setup.data)
    except ValueError as error:
        checked.error = str(error)
        return checked
    checked.renderers = renderers_by_folder(rows, setup.renderer, setup.data)
    seen: dict[int, int] = {}
    with tqdm(total=len(rows), desc=title, unit="row", disable=None) as bar:
        for start in range(0, len(rows), CHUNK):
            indices = range(start, min(start + CHUNK, len(rows)))
            for i, measured in measure_rows(rows, checked.renderers, indices, pool, decode=True):
                _take(checked, i, measured, setup, seen)
            bar.update(len(indices))
    return checked


def _take(checked: Checked, i: int, measured: Measured | RowError, setup: Setup, seen: dict[int, int]) -> None:
    fault = judge(measured, setup.data, setup.limit_images, setup.limit_videos)
    if not isinstance(measured, RowError):
        checked.lengths.append(measured.length)
        checked.sizes += measured.sizes.images
        checked.images.append(len(measured.sizes.images))
        checked.image_tokens += measured.sizes.image_tokens
        checked.frames += [len(footage.indices) for footage in measured.sizes.videos]
        checked.video_tokens += measured.sizes.video_tokens
    if fault is not None:
        filtered = fault.kind == OVERLONG and setup.data.overlong_prompts == "filter"
        (checked.overlong if filtered else checked.faults).append((i, fault))
        return
    assert checked.rows is not None and not isinstance(measured, RowError)
    if measured.length > setup.data.max_prompt_length:  # truncate_left
        problem = f"has {measured.length} prompt tokens and would lose the first"
        checked.overlong.append((i, RowError("prompt cut on the left", problem)))
    row = checked.rows[i]
    checked.notes += [(i, note) for note in _notes(row, i, measured, setup.data, seen, checked.rows)]
    if len(checked.examples) < 3:
        checked.examples.append((checked.rows.label(i), measured.text, row))


def _notes(
    row: dict[str, Any], i: int, measured: Measured, data: DataConfig, seen: dict[int, int], rows: Mixture
) -> Iterator[RowError]:
    answer = row.get(data.answer_key)
    if answer is None or answer != answer or (isinstance(answer, str) and not answer.strip()):
        problem = f"has no answer in column {data.answer_key!r}; the reward function gets {answer!r}"
        yield RowError("no answer", problem, "give it one, or drop the row if its reward needs one")
    elif isinstance(answer, list | dict):
        problem = f"has a {type(answer).__name__} as answer, which the reward function gets as it is"
        yield RowError("answer is not text or a number", problem, "check that your reward function takes it")
    if not measured.sizes.images and not measured.sizes.videos:
        first = seen.setdefault(hash(measured.text), i)
        if first != i:
            yield RowError("prompt seen before", f"has the prompt of {rows.label(first)}", "drop one of them")


def make_setup(options: argparse.Namespace, overrides: list[str]) -> tuple[Setup, list[tuple[str, Any]]]:
    """What to check against, and the sets to check, by title."""
    if options.config is not None:
        config = load_config(options.config, overrides, quiet=True)
        data, model, limit = config.data, config.model, config.rollout.limit_images
        limit_videos = config.rollout.limit_videos
        sets = [("training", data.train_files), *((f"validation {i}", v) for i, v in enumerate(data.val_files, 1))]
    else:
        names = ("prompt_key", "answer_key", "image_key", "video_key", "image_dir", "system_prompt", "format_prompt")
        data = DataConfig(**{name: getattr(options, name) for name in names if getattr(options, name) is not None})
        length = NO_LIMIT if options.max_prompt_length is None else options.max_prompt_length
        data = replace(data, max_prompt_length=length, min_pixels=options.min_pixels, max_pixels=options.max_pixels)
        model = ModelConfig(path=options.model) if options.model else None
        limit, limit_videos = NO_LIMIT if options.limit_images is None else options.limit_images, NO_LIMIT
        sets = [(str(file), str(file)) for file in options.files]
    unit = "tokens"
    if model is not None:
        tokenizer, processor = load_tokenizer(model)
    else:
        tokenizer, processor = stand_in()
        unit = "bytes and image tokens (no --model was given)"
        if data.max_prompt_length != NO_LIMIT:
            raise ValueError("--max-prompt-length counts tokens; give --model too, whose tokenizer makes them")
    folder = Path(data.image_dir) if data.image_dir else None
    renderer = Renderer(data, tokenizer, processor, image_dir=folder)
    return Setup(data=data, renderer=renderer, limit_images=limit, limit_videos=limit_videos, unit=unit), sets


def parse_arguments(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the words that override the config's fields."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # fmt: skip
    if any(word.split("=")[0] == "--config" for word in words):  # all other words are the config's
        parser.set_defaults(files=[])
    else:
        parser.add_argument("files", nargs="*", help="data sources, as data.train_files takes them")
    parser.add_argument("--config", help="a run's config; checks its training and validation sets")
    parser.add_argument("--html", help="also write a page, with thumbnails and every row number, to this file")
    parser.add_argument("--num-workers", type=int, default=max(4, os.cpu_count() or 1), help="threads that read images")
    group = parser.add_argument_group("with files instead of a config")
    group.add_argument("--model", help="folder or hub id whose tokenizer and chat template make the prompts")
    defaults = DataConfig()
    for name in ("prompt_key", "answer_key", "image_key", "video_key"):
        group.add_argument(f"--{name.replace('_', '-')}", default=getattr(defaults, name), help="(%(default)s)")
    for name in ("image_dir", "system_prompt", "format_prompt"):
        group.add_argument(f"--{name.replace('_', '-')}", help=f"as data.{name}")
    group.add_argument("--max-prompt-length", type=int, help="tokens; no limit if not given")
    group.add_argument("--limit-images", type=int, help="most images in a row; no limit if not given")
    group.add_argument("--min-pixels", type=int, default=defaults.min_pixels, help="(%(default)s)")
    group.add_argument("--max-pixels", type=int, default=defaults.max_pixels, help="(%(default)s)")
    options, overrides = parser.parse_known_args(words)
    if options.config is None and overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    if options.config is None and not options.files:
        parser.error("give --config CONFIG, or one or more files")
    if options.num_workers < 1:
        parser.error(f"--num-workers must be at least 1, got {options.num_workers}")
    if options.html is not None and not Path(options.html).absolute().parent.is_dir():
        parser.error(f"--html {options.html}: there is no folder {Path(options.html).parent}")  # before the long check
    return options, overrides


def main(words: Sequence[str]) -> int:
    options, overrides = parse_arguments(words)
    try:
        setup, sets = make_setup(options, overrides)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    with ThreadPoolExecutor(options.num_workers) as pool:
        results = [check_set(title, sources, setup, pool) for title, sources in sets]
    for checked in results:
        sys.stdout.write(text_report(checked, setup.data) + "\n")
    if options.html:
        write_html(Path(options.html), results, setup.data)
        sys.stdout.write(f"wrote {options.html}\n")
    return 0 if all(checked.is_good for checked in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
