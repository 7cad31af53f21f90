"""Make the picture demo from a seed: pictures with questions, and a tiny Qwen2.5-VL that a careless teacher taught.

    python tools/make_demo.py [--output runs/demo-data]

The teacher is right 43% of the time and else says one too many, so the model that imitates it (supervised steps) sees,
but is wrong more often than right. What GRPO has to find, from rewards on pictures the teacher never saw, is which of
its two answers is the right one.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
from demo_model import build_model, build_processor, build_tokenizer, save
from demo_pictures import ANSWERS, QUESTIONS, SIZE, make_rows, write_rows

TRAIN_ROWS, VAL_ROWS, TEACHER_ROWS = 2000, 200, 4000
BATCH, LR, MAX_GRAD_NORM = 64, 1e-3, 0.15
RIGHT = 0.43  # of the teacher's answers; the others are one too many

Row = tuple[object, str, str]


class Classroom:
    """Rows as tensors, supervised steps on them, and what the model thinks of them."""

    def __init__(self, seed: int) -> None:
        texts = [*(q.text for q in QUESTIONS), "user assistant \\boxed{0}"]
        self.tokenizer = build_tokenizer(texts * 2)
        self.processor = build_processor(self.tokenizer, SIZE * SIZE)
        self.model = build_model(self.tokenizer, seed)
        self.image_id = self.model.config.image_token_id

    def encode(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Pixels [N, patches, dim], grids [N, 3], and prompt ids with their image tokens expanded."""
        images = self.processor.image_processor(images=[r[0] for r in rows], return_tensors="pt")
        grids, prompts = images["image_grid_thw"], []
        for (_, question, _), grid in zip(rows, grids, strict=True):
            content = [{"type": "image"}, {"type": "text", "text": question}]
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            prompts.append(
                self.tokenizer.encode(text.replace("<|image_pad|>", "<|image_pad|>" * int(grid.prod() // 4)))
            )
        return images["pixel_values"].view(len(rows), int(grids[0].prod()), -1), grids, prompts

    def logits(self, ids: Sequence[Sequence[int]], pixels: Tensor, grids: Tensor) -> Tensor:
        """[N, L, vocabulary], rows padded on the right."""
        longest = max(map(len, ids))
        tokens = torch.full((len(ids), longest), self.tokenizer.pad_token_id)
        for row, sequence in zip(tokens, ids, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        mask = torch.arange(longest) < torch.tensor([[len(s)] for s in ids])
        kinds = (tokens == self.image_id).int()
        return self.model(
            input_ids=tokens, attention_mask=mask.int(), pixel_values=pixels.flatten(0, 1), image_grid_thw=grids,
            mm_token_type_ids=kinds, use_cache=False,
        ).logits.float()  # fmt: skip

    def loss(self, prompts: Sequence[list[int]], answers: Sequence[str], pixels: Tensor, grids: Tensor) -> Tensor:
        """Mean cross-entropy of the answers' tokens."""
        replies = [[*self.tokenizer.encode(f"\\boxed{{{a}}}"), self.tokenizer.eos_token_id] for a in answers]
        logits = self.logits([p + r for p, r in zip(prompts, replies, strict=True)], pixels, grids)
        parts = [
            cross_entropy(row[len(p) - 1 : len(p) + len(r) - 1], torch.tensor(r))
            for row, p, r in zip(logits, prompts, replies, strict=True)
        ]
        return torch.stack(parts).mean()

    @torch.no_grad()
    def accuracy(self, rows: Sequence[Row], *, blind: bool = False) -> tuple[float, float]:
        """Greedy and sampled accuracy; blind: every picture is replaced by another row's."""
        pixels, grids, prompts = self.encode(rows)
        if blind:
            pixels = pixels.roll(1, dims=0)
        before = self.tokenizer.encode("\\boxed{")
        logits = self.logits([p + before for p in prompts], pixels, grids)
        last = torch.stack([row[len(p) + len(before) - 1] for row, p in zip(logits, prompts, strict=True)])
        digits = [self.tokenizer.encode(str(a))[-1] for a in ANSWERS]
        right = torch.tensor([ANSWERS.index(int(answer)) for _, _, answer in rows])
        chances = last.softmax(-1)[:, digits]
        greedy = (chances.argmax(-1) == right).float().mean()
        return float(greedy), float(chances.gather(1, right[:, None]).mean())


def teacher(answer: str, rng: random.Random) -> str:
    """What the careless teacher says: the right answer, or one too many (from the top back to 0)."""
    return answer if rng.random() < RIGHT else str((int(answer) + 1) % len(ANSWERS))


def warm_start(room: Classroom, rows: Sequence[Row], probe: Sequence[Row], steps: int, seed: int) -> None:
    """Supervised steps on the teacher's answers."""
    pixels, grids, prompts = room.encode(rows)
    rng, order, began = random.Random(seed), list(range(len(rows))), time.monotonic()
    optimizer = torch.optim.AdamW(room.model.parameters(), lr=LR, betas=(0.9, 0.999))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 20)
        if step * BATCH % len(order) < BATCH:
            rng.shuffle(order)
        chosen = [order[(step * BATCH + i) % len(order)] for i in range(BATCH)]
        answers = [teacher(rows[i][2], rng) for i in chosen]
        loss = room.loss([prompts[i] for i in chosen], answers, pixels[chosen], grids[chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(room.model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if step % 50 == 49 or step + 1 == steps:
            greedy, sampled = room.accuracy(probe)
            seconds = time.monotonic() - began
            print(f"warm start {step + 1}/{steps}: loss {float(loss.detach()):.3f}, held-out accuracy "
                  f"greedy {greedy:.2f}, sampled {sampled:.2f}, {seconds:.0f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/demo-data"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of pictures, weights and lessons")
    parser.add_argument("--steps", type=int, default=250, help="supervised steps on the teacher's answers")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    val = make_rows(VAL_ROWS, options.seed + 2)
    write_rows(make_rows(TRAIN_ROWS, options.seed + 1), options.output / "train.jsonl")
    write_rows(val, options.output / "val.jsonl")
    room = Classroom(options.seed)
    count = sum(p.numel() for p in room.model.parameters())
    print(
        f"{TRAIN_ROWS} pictures to train on, {VAL_ROWS} held out; a model of {count / 1e6:.2f}M parameters", flush=True
    )
    warm_start(room, make_rows(TEACHER_ROWS, options.seed + 3), val, options.steps, options.seed)
    save(room.model, room.processor, options.output / "model")
    greedy, sampled = room.accuracy(val)
    blind, _ = room.accuracy(val, blind=True)
    print(f"held-out accuracy: greedy {greedy:.3f}, sampled {sampled:.3f}; with another row's picture {blind:.3f}; "
          f"chance {1 / len(ANSWERS):.3f}")  # fmt: skip
    print(f"written to {options.output}; next: torchrun --nproc_per_node 2 -m r1.train --config configs/demo.py")


if __name__ == "__main__":
    main()
