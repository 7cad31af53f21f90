"""The demo's data: small pictures of coloured shapes, and counting questions that need the picture.

Every question comes with every answer equally often, so an answer that ignores the picture is right one time in five.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

COLORS = {"red": (255, 0, 0), "green": (0, 220, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles"}
ANSWERS = (0, 1, 2, 3, 4)
GRID = 3  # cells a side
CELL = 28  # pixels: one merged vision token of Qwen2.5-VL, so a picture is 9 tokens
SIZE = GRID * CELL
BACKGROUND = (122, 116, 104)  # the processor's mean colour: an empty patch is all zeros, and a tiny model learns fast


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One shape: its box lies inside its cell."""

    shape: str
    color: str
    left: int  # pixels
    top: int
    width: int

    def draw(self, canvas: ImageDraw.ImageDraw) -> None:
        left, top, right, bottom = self.left, self.top, self.left + self.width, self.top + self.width
        if self.shape == "circle":
            canvas.ellipse((left, top, right, bottom), fill=COLORS[self.color])
        elif self.shape == "square":
            canvas.rectangle((left, top, right, bottom), fill=COLORS[self.color])
        else:
            canvas.polygon([(left, bottom), ((left + right) // 2, top), (right, bottom)], fill=COLORS[self.color])


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """How many shapes of one kind or one colour a picture has."""

    attribute: str  # "color" or "shape"
    value: str

    @property
    def text(self) -> str:
        noun = f"{self.value} shapes" if self.attribute == "color" else SHAPES[self.value]
        return f"How many {noun} are there?"


QUESTIONS = tuple([Question(attribute="color", value=c) for c in COLORS])


def draw_shapes(question: Question, answer: int, rng: random.Random) -> list[Shape]:
    """Place `answer` shapes that match the question and 1 to 4 that do not, each in a cell of its own."""
    cells = rng.sample(range(GRID * GRID), answer + rng.randint(1, 4))
    shapes = []
    for i, cell in enumerate(cells):
        looks = {}
        for attribute, values in (("color", list(COLORS)), ("shape", list(SHAPES))):
            if attribute == question.attribute:
                values = [v for v in values if (v == question.value) == (i < answer)]
            looks[attribute] = rng.choice(values)
        width = rng.randint(17, 23)
        left, top = ((c * CELL) + rng.randint(1, CELL - 2 - width) for c in (cell % GRID, cell // GRID))
        shapes.append(Shape(left=left, top=top, width=width, **looks))
    return shapes


def draw_picture(shapes: Sequence[Shape]) -> Image.Image:
    """RGB picture of SIZE x SIZE pixels, without anti-aliasing: a shape's pixels all have its colour."""
    picture = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
    canvas = ImageDraw.Draw(picture)
    for shape in shapes:
        shape.draw(canvas)
    return picture


def make_rows(num_rows: int, seed: int) -> list[tuple[Image.Image, str, str]]:
    """Pictures, questions and answers in random order, every (question, answer) pair equally often.

    The result is a function of the two arguments alone.

    Raises:
        ValueError: num_rows is no multiple of the number of pairs.
    """
    pairs = [(q, a) for q in QUESTIONS for a in ANSWERS]
    if num_rows % len(pairs):
        raise ValueError(f"{num_rows} rows cannot be balanced over {len(pairs)} question-answer pairs; use a multiple")
    rng = random.Random(seed)
    order = pairs * (num_rows // len(pairs))
    rng.shuffle(order)
    return [(draw_picture(draw_shapes(q, a, rng)), q.text, str(a)) for q, a in order]


def write_rows(rows: Sequence[tuple[Image.Image, str, str]], path: Path) -> None:
    """Write a JSONL file of columns problem, answer, images, and the PNG files in a folder beside it."""
    folder = path.parent / f"{path.stem}_images"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for i, (picture, question, answer) in enumerate(rows):
            image = f"{folder.name}/{i:05d}.png"
            picture.save(path.parent / image)
            file.write(json.dumps({"problem": f"<image>{question}", "answer": answer, "images": [image]}) + "\n")
