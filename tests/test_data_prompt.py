"""Prompts: one tokenization, image tokens expanded as the model's processor does, tags checked against images."""

import base64
import io
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from r1.config import DataConfig
from r1.data.chat import RowError
from r1.data.prompt import Renderer
from tests.tiny import VISION_FAMILIES, make_processor, make_tokenizer


def picture(width: int, height: int) -> Image.Image:
    return Image.effect_noise((width, height), 60).convert("RGB")


def make_renderer(family: str | None = "qwen2_5_vl", image_dir: Path | None = None, **options: Any) -> Renderer:
    config = DataConfig(**{"min_pixels": 64 * 64, "max_pixels": 200 * 200, **options})
    processor = make_processor(family) if family else None
    return Renderer(config, processor.tokenizer if processor else make_tokenizer(), processor, image_dir=image_dir)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_ids_and_pixels_equal_the_familys_own_processor(family):
    renderer = make_renderer(family)
    row = {"problem": "<image>left of <image>?", "answer": "yes", "images": [picture(100, 70), picture(640, 31)]}
    prompt = renderer.build(3, row)
    processor = make_processor(family)
    theirs = processor(text=[prompt.text], images=prompt.images, return_tensors="pt", **renderer.mm_processor_kwargs)
    assert prompt.prompt_ids == theirs["input_ids"][0].tolist()
    assert torch.equal(prompt.pixel_values, theirs["pixel_values"])
    assert torch.equal(prompt.image_grid_thw, theirs["image_grid_thw"])
    assert prompt.image_grid_thw.dtype == torch.int64 and prompt.pixel_values.dtype == torch.float32
    assert renderer.length(row) == len(prompt.prompt_ids)
    assert prompt.sampler_ids.count(renderer.vision.image_token_id) == 2
    assert prompt.row == 3 and prompt.ground_truth == "yes" and prompt.fields == {"problem": row["problem"]}


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_length_reads_headers_only_and_equals_the_built_length(family, tmp_path):
    renderer = make_renderer(family, image_dir=tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    picture(30, 170).save(buffer, "JPEG", exif=exif)
    picture(1, 1).save(tmp_path / "dot.png")
    for image in (picture(500, 300), picture(57, 56), buffer.getvalue(), "dot.png", {"bytes": None, "path": "dot.png"}):
        row = {"problem": "What? <image>", "answer": 1, "images": [image]}
        assert renderer.length(row) == len(renderer.build(0, row).prompt_ids)
    cut = buffer.getvalue()[:-200]
    row = {"problem": "<image>", "answer": 1, "images": [cut]}
    assert renderer.length(row) > 0
    with pytest.raises(
        RowError, match=r"row 3 has an image that cannot be used: cannot read image <\d+ bytes>: .*truncated"
    ):
        renderer.build(3, row)


@pytest.mark.parametrize("images", [None, float("nan"), [], "absent"], ids=str)
def test_D01_D02_rows_without_images_are_text_rows(images):
    renderer = make_renderer()
    row = {"problem": "2+2?", "answer": "4"} | ({} if images == "absent" else {"images": images})
    prompt = renderer.build(0, row)
    assert prompt.pixel_values is None and prompt.image_grid_thw is None and prompt.images == []
    assert prompt.prompt_ids == prompt.sampler_ids
    assert renderer.vision.image_token_id not in prompt.prompt_ids
    assert prompt.text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def test_D03_a_tag_in_the_answer_is_text():
    row = {"problem": "<image>\nParse this.", "answer": "![fig](<image>)", "images": [picture(80, 80)]}
    prompt = make_renderer().build(0, row)
    assert len(prompt.images) == 1 and prompt.ground_truth == "![fig](<image>)"


def test_D04_one_bare_image_counts_as_one(tmp_path):
    picture(80, 80).save(tmp_path / "test1.jpg")
    renderer = make_renderer(image_dir=tmp_path)
    for images in ("test1.jpg", {"path": "test1.jpg"}, (tmp_path / "test1.jpg").read_bytes()):
        assert len(renderer.build(0, {"problem": "<image>?", "answer": "", "images": images}).images) == 1


@pytest.mark.parametrize(
    ("problem", "num_images", "message"),
    [
        ("<image> and <image>", 1, "row 17 has 2 <image> tags in the prompt but 1 image; each <image> needs one image"),
        ("no tag", 1, "row 17 has 0 <image> tags in the prompt but 1 image; put <image> where it belongs"),
        ("<image>", 0, "row 17 has 1 <image> tag in the prompt but 0 images"),
        ("  ", 0, "row 17 has an empty prompt in column 'problem'"),
        (None, 0, "row 17 has a NoneType in column 'problem'"),
        ("a <|image_pad|>", 0, r"row 17 has 1 <\|image_pad\|> tokens for 0 images; take <\|image_pad\|> out"),
        ("a <|video_pad|>", 0, r"row 17 has 1 <\|video_pad\|> tokens for 0 videos"),
    ],
)
def test_rows_that_do_not_fit_are_named(problem, num_images, message):
    row = {"problem": problem, "answer": "", "images": [picture(60, 60)] * num_images}
    with pytest.raises(RowError, match=message):
        make_renderer().build(17, row)
    with pytest.raises(RowError, match=message.removeprefix("row 17 ")):
        make_renderer().length(row)


def test_text_models_take_tags_as_text_and_refuse_images():
    renderer = make_renderer(None)
    assert "an <image> tag" in renderer.build(0, {"problem": "an <image> tag", "answer": ""}).text
    assert renderer.mm_processor_kwargs == {}
    with pytest.raises(RowError, match="has 1 image, but the model takes text only"):
        renderer.render({"problem": "<image>", "images": ["a.png"]})


def test_system_prompt_format_prompt_and_override(tmp_path):
    (tmp_path / "math.jinja").write_text("{{ content | trim }}\nThink & box it.\n\n")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>")
    options = {"system_prompt": "Be brief.", "format_prompt": str(tmp_path / "math.jinja")}
    row = {"problem": " Is 1 < 2? ", "answer": ""}
    text = make_renderer(**options).render(row)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nIs 1 < 2?\nThink & box it.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    text = make_renderer(**options, override_chat_template=str(tmp_path / "chat.jinja")).render(row)
    assert text == "[system]Be brief.[user]Is 1 < 2?\nThink & box it.>"


def test_a_format_prompt_may_bring_the_tag(tmp_path):
    (tmp_path / "f.jinja").write_text("<image>{{ content }}")
    row = {"problem": "what?", "answer": "", "images": [picture(60, 60)]}
    text = make_renderer(format_prompt=str(tmp_path / "f.jinja")).render(row)
    assert "<|vision_start|><|image_pad|><|vision_end|>what?" in text


def test_broken_templates_and_bounds_end_before_the_first_row(tmp_path):
    (tmp_path / "no_content.jinja").write_text("{{ contents }}")
    (tmp_path / "broken.jinja").write_text("{{ content ")
    for options, message in [
        ({"format_prompt": str(tmp_path / "no_content.jinja")}, r"uses \['contents'\]; expected \{\{ content \}\}"),
        ({"format_prompt": str(tmp_path / "broken.jinja")}, "data.format_prompt: cannot use"),
        ({"format_prompt": str(tmp_path / "absent.jinja")}, "data.format_prompt: cannot use"),
        ({"override_chat_template": str(tmp_path / "absent.jinja")}, "data.override_chat_template: cannot read"),
        ({"min_pixels": 100, "max_pixels": 700}, "no image size is a multiple of 28"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_renderer(**options)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(DataConfig(), tokenizer, None, image_dir=None)


def test_T05_the_templates_bos_is_the_only_one(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert tokenizer("a")["input_ids"][0] == bos  # this tokenizer adds one on its own
    (tmp_path / "chat.jinja").write_text("<|endoftext|>{{ messages[0].content }}")
    config = DataConfig(override_chat_template=str(tmp_path / "chat.jinja"))
    prompt = Renderer(config, tokenizer, None, image_dir=None).build(0, {"problem": "a", "answer": ""})
    assert prompt.prompt_ids == [bos, *tokenizer("a", add_special_tokens=False)["input_ids"]]


def test_D14_answers_and_other_columns():
    renderer = make_renderer()
    answers = {"5": 5, "2.5": 2.5, "True": True, "x": "x"}
    for expected, answer in answers.items():
        assert renderer.build(0, {"problem": "p", "answer": answer}).ground_truth == expected
    for answer in ([1, 2], None, {"a": 1}):
        assert renderer.build(0, {"problem": "p", "answer": answer}).ground_truth == answer
    assert renderer.build(0, {"problem": "p", "answer": float("nan")}).ground_truth is None
    fields = renderer.build(0, {"problem": "p", "answer": 1, "images": [], "level": 3}).fields
    assert fields == {"problem": "p", "level": 3}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_chat_messages_with_string_and_typed_content():
    renderer = make_renderer(system_prompt="Be brief.")
    turns = [
        {"role": "user", "content": "<image>What is it?"},
        {"role": "assistant", "content": "A circle."},
        {"role": "user", "content": "And <image>?"},
    ]
    images = [picture(60, 60), picture(80, 60)]
    prompt = renderer.build(0, {"problem": turns, "answer": "a square", "images": images})
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt.text == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{image}What is it?<|im_end|>\n"
        f"<|im_start|>assistant\nA circle.<|im_end|>\n<|im_start|>user\nAnd {image}?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(prompt.images) == 2
    typed = [
        {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]},
        turns[1],
        user("And ", {"type": "image"}, {"type": "text", "text": "?", "image": None}),
    ]
    assert renderer.build(0, {"problem": typed, "answer": "a square", "images": images}).prompt_ids == prompt.prompt_ids
    # A row's own system turn stands in place of the config's.
    own = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "2+2?"}]
    assert renderer.render({"problem": own}).startswith("<|im_start|>system\nRhyme.<|im_end|>\n<|im_start|>user\n2+2?")


def test_images_may_stand_inside_the_messages(tmp_path):
    picture(60, 60).save(tmp_path / "a.png")
    renderer = make_renderer(image_dir=tmp_path)
    data = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    parts = [
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "image", "url": (tmp_path / "a.png").as_uri()},
    ]
    row = {"problem": [user(*parts, {"type": "text", "text": "same?"})], "answer": "yes", "images": None}
    prompt = renderer.build(0, row)
    assert len(prompt.images) == 3 and len({image.tobytes() for image in prompt.images}) == 1
    assert renderer.length(row) == len(prompt.prompt_ids)
    with pytest.raises(RowError, match="has images in its messages and in column 'images'"):
        renderer.build(0, row | {"images": "a.png"})


def test_D03_tags_are_places_in_the_users_text_only():
    turns = [
        {"role": "system", "content": "Write <image> where a figure goes."},
        user({"type": "image"}, {"type": "text", "text": "Is <image> a tag?"}),
        {"role": "assistant", "content": "![fig](<image>)"},
        {"role": "user", "content": "Then draw <image> again. <video> is a word."},
    ]
    images = [picture(60, 60), picture(60, 60)]
    prompt = make_renderer(system_prompt="<image>").build(0, {"problem": turns, "answer": "<image>", "images": images})
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    for text in (
        "Write <image> where",
        f"{image}Is <image> a tag?",
        "![fig](<image>)",
        f"Then draw {image} again. <video> is a word.",
    ):
        assert text in prompt.text
    assert prompt.text.count(image) == len(prompt.images) == 2
    row = {"problem": "2+2?", "answer": ""}
    assert "system\nSay <image>.<|im_end|>" in make_renderer(system_prompt="Say <image>.").render(row)


def test_format_prompt_wraps_the_users_last_turn(tmp_path):
    (tmp_path / "f.jinja").write_text("<image>{{ content }} Box it.")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    renderer = make_renderer(format_prompt=str(tmp_path / "f.jinja"))
    for last in ({"role": "user", "content": "2+2?"}, user({"type": "text", "text": "2+2?"})):
        text = renderer.render({"problem": [*turns, last], "images": [picture(60, 60)]})
        assert "user\nhi<|im_end|>" in text
        assert "user\n<|vision_start|><|image_pad|><|vision_end|>2+2? Box it.<|im_end|>" in text


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "has an empty prompt"),
        (["hi"], 'has a str as message 0; expected {"role"'),
        ([{"from": "human", "value": "hi"}], r"has the keys \['from', 'value'\] as message 0"),
        ([{"role": "robot", "content": "hi"}], "has the role 'robot' in message 0; expected one of system, user"),
        ([{"role": "user", "content": 3}], "has a int as content of message 0"),
        ([user({"type": "audio"})], "has a content part of type 'audio' in message 0"),
        ([user({"type": "text", "text": None})], "has a content part of type 'text'"),
        ([user(7)], "has a content part of int"),
        ([user()], "has an empty prompt"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "ends with a turn by the assistant",
        ),
        ([{"role": "system", "content": "a"}], "ends with a turn by the system"),
        ("half \ud83d of a pair", "has half a surrogate pair"),
    ],
)
def test_malformed_messages_are_named(turns, message):
    with pytest.raises(RowError, match=message):
        make_renderer().build(0, {"problem": turns, "answer": ""})


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}<a>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def test_T09_thinking_is_switched_for_every_prompt_alike(tmp_path):
    (tmp_path / "chat.jinja").write_text(THINKING)
    row, options = {"problem": "2+2?", "answer": ""}, {"override_chat_template": str(tmp_path / "chat.jinja")}
    for switch, end in ((False, "<a><think>\n\n</think>\n\n"), (True, "<a>"), (None, "<a>")):
        kwargs = {} if switch is None else {"enable_thinking": switch}
        renderer = make_renderer(None, chat_template_kwargs=kwargs, **options)
        prompt = renderer.build(0, row)
        assert prompt.text == "[user]2+2?" + end
        # One renderer makes what is trained on and what the sampler is given: the ids of this very text.
        assert prompt.sampler_ids == prompt.prompt_ids == renderer.tokenizer(prompt.text)["input_ids"]
        assert renderer.length(row) == len(prompt.prompt_ids)
    with pytest.raises(ValueError, match=r"has 'enable_thinking', which the chat template does not use"):
        make_renderer(None, chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(ValueError, match=r"data.chat_template_kwargs must not set messages"):
        make_renderer(None, chat_template_kwargs={"messages": "x"})


def test_a_chat_template_that_refuses_the_turns_names_the_row(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    renderer = make_renderer(None, override_chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(RowError, match=r"row 4 does not fit the chat template \(roles must alternate\)"):
        renderer.build(4, {"problem": "hi", "answer": ""})


def test_T07_role_markers_are_in_the_ids_that_the_sampler_is_given():
    prompt = make_renderer(None).build(0, {"problem": "hi", "answer": ""})
    tokenizer = make_tokenizer()
    assert prompt.sampler_ids == prompt.prompt_ids
    assert tokenizer.decode(prompt.sampler_ids, skip_special_tokens=False) == prompt.text
    assert prompt.sampler_ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")


def test_D14_scalars_of_other_types_become_text():
    renderer = make_renderer(None)
    answers = [Decimal("1.50"), date(2020, 1, 2), np.float32(0.5), np.int64(3), np.bool_(True), float("nan"), [1]]
    truths = [renderer.build(0, {"problem": "p", "answer": answer}).ground_truth for answer in answers]
    assert truths == ["1.50", "2020-01-02", "0.5", "3", "True", None, [1]]


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path):
    path = tmp_path / "format.jinja"
    path.write_text("\ufeff{{ content }}!", encoding="utf-8")
    renderer = make_renderer(None, format_prompt=str(path))
    assert "user\nhi!<|im_end|>" in renderer.build(0, {"problem": "hi", "answer": "1"}).text
