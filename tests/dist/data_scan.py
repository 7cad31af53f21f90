"""Program: every rank loads the data set FILE, with bad rows skipped, and writes what it will train on to OUT.RANK."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from r1.config import DataConfig
from r1.data.loader import Loader
from r1.data.prompt import Renderer
from r1.data.vision import Sizes
from tests.tiny import make_processor
from r1.faults import leave


def main() -> None:
    file, out = sys.argv[1:]
    dist.init_process_group("gloo")
    config = DataConfig(min_pixels=3136, max_pixels=40000, rollout_batch_size=4, num_workers=1, on_bad_row="skip")
    processor = make_processor("qwen2_5_vl")
    decoded: list[object] = []
    renderer = Renderer(config, processor.tokenizer, processor, image_dir=None)
    measure = renderer.vision.measure

    def counted(images: list[Any], videos: list[Any], folder: Path | None, *, decode: bool) -> Sizes:
        decoded.append(images)
        return measure(images, videos, folder, decode=decode)

    renderer.vision.measure = counted
    loader = Loader(file, config, renderer, shuffle=True, limit_images=1)
    found = {"kept": loader.kept, "skipped": loader.skipped, "steps": [loader.rows_at(s) for s in range(1, 6)]}
    found["checked"] = len(decoded)
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
