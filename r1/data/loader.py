"""Which rows a step trains on, and their prompts, made in threads.

The order is a function of (seed, step), the same on any number of ranks: there is nothing to save and nothing to lose.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from tqdm import tqdm

from r1.config import DataConfig
from r1.data.faults import RowError
from r1.data.mixture import Mixture, check_columns, permutation, weighted_order
from r1.data.prompt import Renderer
from r1.data.scan import Scan, renderers_by_folder, scan_rows, summary
from r1.data.sources import as_sources
from r1.parallel import is_first_rank
from r1.types import Prompt

__all__ = ["Loader", "check_columns"]

CACHE_BYTES = 2 * 2**30  # of pixels per rank: a step's prompts are asked for when sampling and again when training
MAX_SUBSTITUTES = 100


class Loader:
    """The rows of one data set, or of several mixed, that can be used, in order, and the prompts made from them."""

    def __init__(
        self,
        source: str | Sequence[str],
        config: DataConfig,
        renderer: Renderer,
        *,
        shuffle: bool,
        limit_images: int,
        limit_videos: int = 0,
    ) -> None:
        """Read the rows and check each: its columns, tags, images and length in tokens; collective over ranks.

        Args:
            source: one or several, see load_rows.
            renderer: relative image paths start from its folder where data.image_dir is set, else from the source's.
            shuffle: a new order each epoch; False: the file's order.
            limit_images: most images in one row that the engine takes; limit_videos: most videos.

        Raises:
            ValueError: a missing column, a row that cannot be used (unless data.on_bad_row is skip), nothing left.
        """
        self.config = config
        self.renderer = renderer
        self.shuffle = shuffle
        self._pool = ThreadPoolExecutor(config.num_workers, thread_name_prefix="r1-data")
        self._cache: OrderedDict[int, Prompt] = OrderedDict()
        self._cache_bytes = 0
        self._lock = Lock()
        self._orders: dict[int, Sequence[int]] = {}  # of the epoch under way
        # The next step's prompts have threads of their own: this step's must not wait behind them.
        self._ahead_pool = ThreadPoolExecutor(max(1, config.num_workers // 2), thread_name_prefix="r1-ahead")
        self._ahead: dict[int, Future[None]] = {}
        self.rows = Mixture(as_sources(source), config)
        self.name = self.rows.name
        self._renderers = renderers_by_folder(self.rows, renderer, config)
        quiet = not is_first_rank()
        with tqdm(total=len(self.rows), desc=f"check {self.name}", unit="row", delay=1, disable=quiet) as bar:
            pool = self._pool if renderer.vision is not None else None
            scan = scan_rows(
                self.rows,
                self._renderers,
                config,
                pool,
                limit_images=limit_images,
                limit_videos=limit_videos,
                progress=lambda n: bar.update(n),
            )
        self.kept = scan.kept  # positions in the mixture of the rows that are used
        self.dropped, self.skipped = len(scan.overlong), len(scan.faults)
        self._report(scan)
        self._groups = self._rows_by_source() if self.rows.weights else []

    @property
    def num_rows(self) -> int:
        """Rows after filtering."""
        return len(self.kept)

    def rows_at(self, step: int) -> list[int]:
        """The rollout_batch_size rows of a step, over all ranks, as positions among the rows that are used.

        Each epoch is one permutation of all rows, or with weights as many draws, shared out by them; what does not
        fill a batch at its end is left out.

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
        if epoch not in self._orders:
            self._orders = {epoch: self._order(epoch, steps * batch)}
        order = self._orders[epoch]
        return [int(i) for i in order[position * batch : (position + 1) * batch]]

    def prepare(self, rows: Sequence[int]) -> list[Prompt]:
        """The prompts of rows (positions among the rows that are used), decoded and tokenized in threads.

        With data.on_bad_row=skip a row that has become unreadable since the check is replaced by the next one that can
        be read, on every rank the same.

        Raises:
            RowError: a row whose image is damaged behind its header; names the row by its position in the file.
        """
        return list(self._pool.map(self._prompt, rows))

    def prefetch(self, step: int, share: slice, *, keep: Collection[int]) -> None:
        """Begin to make the prompts of a step's share in the background; returns at once.

        No more are made than fit into the cache beside what is in use.

        Args:
            keep: rows of the step under way; all others are forgotten.
        """
        rows = self.rows_at(step)
        needed = {*rows, *keep}
        for future in self._ahead.values():
            future.cancel()
        with self._lock:
            for row in [r for r in self._cache if r not in needed]:
                self._cache_bytes -= _num_bytes(self._cache.pop(row))
        self._ahead = {row: self._ahead_pool.submit(self._make_ahead, row) for row in rows[share]}

    def _make_ahead(self, row: int) -> None:
        with self._lock:
            if self._cache_bytes > CACHE_BYTES // 2:
                return
        self._prompt(row, ahead=True)

    def _prompt(self, row: int, *, ahead: bool = False) -> Prompt:
        if not ahead and (future := self._ahead.get(row)) is not None and future.running():
            future.exception()  # wait rather than make it twice; a fault is raised below, when it is made again
        with self._lock:
            if (prompt := self._cache.get(row)) is not None:
                self._cache.move_to_end(row)
                return prompt
        prompt = self._build(row)
        with self._lock:
            self._remember(row, prompt)
        return prompt

    def _build(self, row: int) -> Prompt:
        """The row's prompt; under data.on_bad_row=skip, if it cannot be made, that of the next row that can."""
        first: RowError | None = None
        for k in range(min(self.num_rows, MAX_SUBSTITUTES)):
            substitute = (row + k) % self.num_rows
            position = self.kept[substitute]
            try:
                prompt = self._renderers[self.rows.folder(position)].build(position, self.rows[position])
            except RowError as error:
                # The renderer names the row by the position it was given; the file's own is what a reader looks up.
                problem = error.problem.removeprefix(f"row {position} ")
                first = first or RowError(error.kind, f"{self.rows.label(position)} {problem}", error.fix)
                if self.config.on_bad_row == "error":
                    raise first from error
                continue
            prompt.row = substitute  # from here on it is the loader's own index
            if first is not None:
                tqdm.write(f"{first}; {self.rows.label(position)} takes its place")
            return prompt
        raise first or ValueError(f"{self.name} has no rows")

    def _remember(self, row: int, prompt: Prompt) -> None:
        if row in self._cache:  # another thread was first
            return
        self._cache[row] = prompt
        self._cache_bytes += _num_bytes(prompt)
        while self._cache_bytes > CACHE_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= _num_bytes(oldest)

    def _order(self, epoch: int, draws: int) -> Sequence[int]:
        config, weights = self.config, self.rows.weights
        if weights is not None:
            return weighted_order(
                self._groups, weights, draws=draws, seed=config.seed, epoch=epoch, shuffle=self.shuffle
            )
        if not self.shuffle:
            return range(self.num_rows)
        return permutation(config.seed, epoch, self.num_rows).tolist()

    def _rows_by_source(self) -> list[list[int]]:
        groups: list[list[int]] = [[] for _ in self.rows.sources]
        for row, position in enumerate(self.kept):
            groups[self.rows.source(position)].append(row)
        for source, group in zip(self.rows.sources, groups, strict=True):
            if not group:
                raise ValueError(f"no row of {source.name} can be used, so it cannot have a share; take it out")
        return groups

    def _report(self, scan: Scan) -> None:
        """Say what is left out, or raise ValueError if that may not be."""
        config, total = self.config, len(self.rows)
        if scan.faults and (config.on_bad_row == "error" or not scan.kept):
            i, fault = scan.faults[0]
            more = f" ({len(scan.faults)} such rows in all)" if len(scan.faults) > 1 else ""
            if fault.kind in scan.most:
                fault.fix = f"the most in any row is {scan.most[fault.kind]}: set it to that"
            skip = "" if config.on_bad_row == "skip" else "; data.on_bad_row=skip trains without it"
            raise ValueError(f"{self.rows.label(i)} {fault}{more}{skip}")
        if not self.kept:
            raise ValueError(
                f"all {total} rows of {self.name} have prompts longer than "
                f"data.max_prompt_length={config.max_prompt_length} tokens; raise it, or lower data.max_pixels"
            )
        if self.skipped and is_first_rank():
            tqdm.write(
                f"{self.name}: {self.skipped} of {total} rows skipped, they cannot be used (data.on_bad_row=skip)"
            )
            for line in summary(self.rows, scan.faults):
                tqdm.write(f"  {line}")
        if self.dropped and is_first_rank():
            tqdm.write(
                f"{self.name}: {self.dropped} of {total} rows dropped, their prompts are longer than "
                f"data.max_prompt_length={config.max_prompt_length} tokens"
            )


def _num_bytes(prompt: Prompt) -> int:
    pixels = prompt.pixel_values.nbytes if prompt.pixel_values is not None else 0
    if prompt.pixel_values_videos is not None:
        pixels += prompt.pixel_values_videos.nbytes + sum(frames.nbytes for frames, _ in prompt.videos)
    return pixels + sum(3 * image.width * image.height for image in prompt.images)
