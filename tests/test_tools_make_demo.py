"""The demo's pictures: the same from a seed, answered rightly, balanced, and no held-out one among the others."""

import collections
import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import demo_pictures as pictures
import make_demo

ROWS = len(pictures.QUESTIONS) * len(pictures.ANSWERS)


def cells_of_color(picture, color: str) -> int:
    """Count the cells with pixels of exactly this colour: each shape lies in a cell of its own."""
    pixels = np.asarray(picture)
    match = (pixels == pictures.COLORS[color]).all(-1)
    grid = match.reshape(pictures.GRID, pictures.CELL, pictures.GRID, pictures.CELL)
    return int(grid.any((1, 3)).sum())


def test_answers_are_what_the_picture_shows():
    for picture, question, answer in pictures.make_rows(ROWS * 3, seed=5):
        assert picture.size == (pictures.SIZE, pictures.SIZE)
        color = next(c for c in pictures.COLORS if c in question)
        assert cells_of_color(picture, color) == int(answer)


def test_every_question_has_every_answer_equally_often():
    rows = pictures.make_rows(ROWS * 4, seed=1)
    counts = collections.Counter((question, answer) for _, question, answer in rows)
    assert len(counts) == ROWS and set(counts.values()) == {4}
    with pytest.raises(ValueError, match="use a multiple"):
        pictures.make_rows(ROWS + 1, seed=1)


def test_pictures_are_a_function_of_the_seed_and_held_out_ones_are_new():
    one, two, other = (pictures.make_rows(ROWS * 5, seed) for seed in (1, 1, 3))
    assert [r[0].tobytes() for r in one] == [r[0].tobytes() for r in two]
    assert not {r[0].tobytes() for r in one} & {r[0].tobytes() for r in other}


def test_the_teacher_is_more_often_wrong_than_right():
    rng = random.Random(0)
    said = collections.Counter(make_demo.teacher("2", rng) for _ in range(2000))
    assert set(said) == {"2", "3"} and said["3"] > said["2"] > 700


def test_supervised_steps_lower_the_loss_and_right_answers_are_found(tmp_path):
    room = make_demo.Classroom(seed=0)
    rows = pictures.make_rows(ROWS, seed=2)
    pixels, grids, prompts = room.encode(rows)
    answers = [r[2] for r in rows]
    first = float(room.loss(prompts, answers, pixels, grids).detach())
    make_demo.warm_start(room, rows, rows, steps=12, seed=0)
    assert float(room.loss(prompts, answers, pixels, grids).detach()) < first - 1
    greedy, sampled = room.accuracy(rows)
    assert 0 <= sampled <= 1 and 0 <= greedy <= 1
