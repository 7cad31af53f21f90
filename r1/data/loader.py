"""Which rows a step trains on, and their prompts, made in threads.

The order is a function of (seed, step), the same on any number of ranks: there is nothing to save and nothing to lose.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock

import numpy as np
from tqdm import tqdm

from r1.config import DataConfig
from r1.data.chat import RowError
from r1.data.prompt import Renderer
from r1.data.rows import Rows, load_rows, set_name
from r1.types import Prompt

SCAN_ROWS = 1000  # rows checked per call of the tokenizer
CACHE_BYTES = 2 * 2**30  # of pixels per rank: a step's prompts are asked for when sampling and again when training


class Loader:
    """The rows of one data set that can be used, in order, and the prompts made from them."""

    def __init__(
        self, source: str, config: DataConfig, renderer: Renderer, *, shuffle: bool, limit_images: int
    ) -> None:
        """Read the rows and check each: its columns, tags, image headers and length in tokens.

        Args:
            source: see load_rows.
            shuffle: a new order each epoch; False: the file's order.
            limit_images: most images in one row that the engine takes.

        Raises:
            ValueError: a missing column, a row that cannot be used or has too many images, or nothing left.
        """
        self.name = set_name(source)
        self.config = config
        self.renderer = renderer
        self.shuffle = shuffle
        self._pool = ThreadPoolExecutor(config.num_workers, thread_name_prefix="r1-data")
        self._cache: OrderedDict[int, Prompt] = OrderedDict()
        self._cache_bytes = 0
        self._lock = Lock()
        self.rows = load_rows(source)
        check_columns(self.rows, config, source=source)
        self.kept = self._scan(limit_images)  # positions in the file of the rows that are used
        self.dropped = len(self.rows) - len(self.kept)
        if not self.kept:
            raise ValueError(
                f"all {len(self.rows)} rows of {self.name} have prompts longer than "
                f"data.max_prompt_length={config.max_prompt_length} tokens; raise it, or lower data.max_pixels"
            )
        if self.dropped and _is_first_rank():
            tqdm.write(
                f"{self.name}: {self.dropped} of {len(self.rows)} rows dropped, their prompts are longer than "
                f"data.max_prompt_length={config.max_prompt_length} tokens"
            )

    @property
    def num_rows(self) -> int:
        """Rows after filtering."""
        return len(self.kept)

    def rows_at(self, step: int) -> list[int]:
        """The rollout_batch_size rows of a step, over all ranks, as positions among the rows that are used.

        Each epoch is one permutation of all rows; what does not fill a batch at its end is left out.

        Args:
            step: counts from 1.

        Raises:
            ValueError: there are fewer rows than one batch.
        """
        batch = self.config.rollout_batch_size
        steps = self.num_rows // batch
        if steps == 0:
            raise ValueError(
                f"{self.name} has {self.num_rows} rows after filtering, fewer than data.rollout_batch_size={batch}; "
                f"lower it to {self.num_rows} or less"
            )
        epoch, position = divmod(step - 1, steps)
        order = _permutation(self.config.seed, epoch, self.num_rows) if self.shuffle else range(self.num_rows)
        return [int(i) for i in order[position * batch : (position + 1) * batch]]

    def prepare(self, rows: Sequence[int]) -> list[Prompt]:
        """The prompts of rows (positions among the rows that are used), decoded and tokenized in threads.

        Raises:
            RowError: a row whose image is damaged behind its header; names the row by its position in the file.
        """
        return list(self._pool.map(self._prompt, rows))

    def _prompt(self, row: int) -> Prompt:
        with self._lock:
            if (prompt := self._cache.get(row)) is not None:
                self._cache.move_to_end(row)
                return prompt
        position = self.kept[row]
        try:
            prompt = self.renderer.build(position, self.rows[position])
        except RowError as error:
            raise RowError(f"{self.name} {error}") from error
        prompt.row = row  # messages have named the place in the file; from here on it is the loader's own index
        with self._lock:
            self._remember(row, prompt)
        return prompt

    def _remember(self, row: int, prompt: Prompt) -> None:
        if row in self._cache:  # another thread was first
            return
        self._cache[row] = prompt
        self._cache_bytes += _num_bytes(prompt)
        while self._cache_bytes > CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= _num_bytes(oldest)

    def _scan(self, limit_images: int) -> list[int]:
        """Check every row once and return those short enough; a bad row ends the run here, not at hour nine."""
        config, kept, bad, most_images = self.config, [], [], 0
        pool = self._pool if self.renderer.image_processor is not None else None
        bar = tqdm(total=len(self.rows), desc=f"check {self.name}", unit="row", delay=1, disable=not _is_first_rank())
        with bar:
            for start in range(0, len(self.rows), SCAN_ROWS):
                indices = range(start, min(start + SCAN_ROWS, len(self.rows)))
                rows = [self.rows[i] for i in indices]
                for i, row, length in zip(indices, rows, self.renderer.lengths(rows, pool), strict=True):
                    num_images = len(self.renderer.image_values(row))
                    most_images = max(most_images, num_images)
                    if isinstance(length, RowError):
                        bad.append(f"row {i} {length}")
                    elif num_images > limit_images:
                        bad.append(f"row {i} has {num_images} images, above rollout.limit_images={limit_images}")
                    elif length <= config.max_prompt_length:
                        kept.append(i)
                    elif config.overlong_prompts == "error":
                        bad.append(
                            f"row {i} needs {length} prompt tokens, above data.max_prompt_length="
                            f"{config.max_prompt_length}; raise it, or set data.overlong_prompts to filter"
                        )
                bar.update(len(rows))
        if bad:
            more = f" ({len(bad)} such rows in all)" if len(bad) > 1 else ""
            fix = f"; the most in any row is {most_images}: set it to that" if most_images > limit_images else ""
            raise ValueError(f"{self.name} {bad[0]}{fix}{more}")
        return kept


def check_columns(rows: Rows, config: DataConfig, *, source: str = "the data") -> None:
    """Raise ValueError unless the prompt and answer columns are there; images may be absent."""
    for option, name in (("data.prompt_key", config.prompt_key), ("data.answer_key", config.answer_key)):
        if name not in rows.column_names:
            raise ValueError(
                f"{source} has no column {name!r}; its columns are {', '.join(rows.column_names)}: set {option} to one"
            )


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _num_bytes(prompt: Prompt) -> int:
    pixels = prompt.pixel_values.nbytes if prompt.pixel_values is not None else 0
    return pixels + sum(3 * image.width * image.height for image in prompt.images)
