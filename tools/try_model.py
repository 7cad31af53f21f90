"""Ask a merged model a question in plain transformers: what a user of the weights gets, without any of r1.

python tools/try_model.py MODEL --question "How many red shapes are there?" --image picture.png
python tools/try_model.py MODEL --rows data/val.jsonl --row 3        # a row's question, pictures and answer
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer


def load_row(path: Path, row: int) -> dict[str, Any]:
    """Row number `row` of a JSON Lines file with the columns problem, answer and, optionally, images."""
    lines = path.read_text().splitlines()
    if not 0 <= row < len(lines):
        raise ValueError(f"{path} has rows 0 to {len(lines) - 1}, got --row {row}")
    return json.loads(lines[row])


def message_content(question: str, images: list[Path]) -> list[dict[str, Any]]:
    """Parts of a chat message: each `<image>` in the question becomes a picture; without any, they come first.

    Raises:
        ValueError: some `<image>` has no picture, or the other way round.
    """
    parts = question.split("<image>")
    if len(parts) == 1:
        parts = [""] * len(images) + parts
    if len(parts) - 1 != len(images):
        raise ValueError(f"the question has {len(parts) - 1} <image> marks but {len(images)} images were given")
    content: list[dict[str, Any]] = []
    for i, text in enumerate(parts):
        if i:
            content.append({"type": "image", "image": Image.open(images[i - 1]).convert("RGB")})
        if text:
            content.append({"type": "text", "text": text})
    return content


def ask(model_path: Path, question: str, images: list[Path], max_new_tokens: int) -> str:
    """The model's greedy answer to one question about any number of pictures."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if images:
        processor = AutoProcessor.from_pretrained(model_path)
        model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="auto").to(device)
        messages = [{"role": "user", "content": message_content(question, images)}]
    else:
        processor = AutoTokenizer.from_pretrained(model_path)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto").to(device)
        messages = [{"role": "user", "content": question}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(device)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main(
    model: Annotated[Path, tyro.conf.Positional],
    /,
    question: str | None = None,
    image: list[Path] | None = None,
    rows: Path | None = None,
    row: int = 0,
    max_new_tokens: int = 512,
) -> None:
    """Print a merged model's greedy answer.

    Args:
        model: Folder that tools/merge.py wrote, or any transformers model.
        question: What to ask; `<image>` marks a picture's place.
        image: Pictures of the question, in order.
        rows: JSON Lines file to take question, pictures and expected answer from, instead.
        row: Number of the row in that file, from 0.
        max_new_tokens: Longest answer.
    """
    if (question is None) == (rows is None):
        raise SystemExit("give either --question (and --image) or --rows (and --row)")
    images, expected = image or [], None
    if rows is not None:
        record = load_row(rows, row)
        question, expected = record["problem"], record["answer"]
        images = [rows.parent / name for name in record.get("images") or []]
    assert question is not None
    print(f"images   {', '.join(map(str, images)) or 'none'}")
    print(f"question {question}")
    print(f"answer   {ask(model, question, images, max_new_tokens)!r}")
    if expected is not None:
        print(f"expected {expected!r}")


if __name__ == "__main__":
    tyro.cli(main)
