"""Images of any form and mode come out as the same upright RGB pixels; sizes agree with the Qwen-VL processors."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as qwen_smart_resize

from r1.data.faults import ImageError
from r1.data.images import describe, image_size, list_images, load_image, resize_image, smart_resize


def picture(width: int = 24, height: int = 16) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_D06_every_form_gives_the_same_pixels(tmp_path):
    image = picture()
    png = encode(image)
    (tmp_path / "a b.png").write_bytes(png)
    text = base64.b64encode(png).decode()
    forms = [
        "a b.png",
        str(tmp_path / "a b.png"),
        Path("a b.png"),
        (tmp_path / "a b.png").as_uri(),
        png,
        bytearray(png),
        {"bytes": png, "path": None},
        {"bytes": None, "path": "a b.png"},
        {"path": "a b.png"},
        f"data:image/png;base64,{text}",
        text,
        image,
        Image.open(io.BytesIO(png)),
    ]
    for form in forms:
        loaded = load_image(form, tmp_path)
        assert loaded.mode == "RGB" and loaded.info == {}
        np.testing.assert_array_equal(np.asarray(loaded), np.asarray(image), err_msg=describe(form))
        assert image_size(form, tmp_path) == (24, 16)


def test_base64_of_a_jpeg_is_no_absolute_path():
    text = base64.b64encode(encode(picture(300, 300), "JPEG")).decode()
    assert text.startswith("/9j/")
    assert load_image(text).size == image_size(text) == (300, 300)


@pytest.mark.parametrize(
    ("cell", "count"),
    [
        (None, 0), (float("nan"), 0), ([], 0), ("", 0), ([None], 0), ({"bytes": None, "path": None}, 0),
        ("test1.jpg", 1), (["a.png", "b.png"], 2), (b"\x89PNG", 1), ({"bytes": b"x", "path": None}, 1),
    ],
)  # fmt: skip
def test_D01_D02_D04_cells_hold_so_many_images(cell, count):
    assert len(list_images(cell)) == count


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_D11_exif_orientation_is_applied_once(kind):
    for orientation, size in ((1, (24, 16)), (3, (24, 16)), (6, (16, 24)), (8, (16, 24))):
        image, exif = Image.new("RGB", (24, 16), "black"), Image.Exif()
        image.paste("white", (0, 0, 12, 16))  # the left half
        exif[0x0112] = orientation
        data = encode(image, kind, exif=exif)
        loaded = load_image(data)
        assert loaded.size == image_size(data) == size
        assert load_image(Image.open(io.BytesIO(data))).size == image_size(Image.open(io.BytesIO(data))) == size
        assert load_image(loaded).size == size
        # Orientation 6 means: turn clockwise by 90 degrees, so the left half ends on top.
        corner = {1: (2, 8), 3: (21, 8), 6: (8, 2), 8: (8, 21)}[orientation]
        assert min(loaded.getpixel(corner)) > 200


def test_broken_exif_leaves_the_picture_as_it_lies():
    data = encode(picture(), "JPEG", exif=b"Exif\x00\x00garbage")
    assert load_image(data).size == image_size(data) == (24, 16)


def test_transparency_is_laid_on_white():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 20, 30, 200, 0, 0])
    palette.putpixel((0, 0), 0)
    gray = Image.new("LA", (4, 4), (0, 0))
    gray.putpixel((0, 0), (10, 255))
    for data in (encode(clear), encode(palette, transparency=1), encode(gray)):
        loaded = load_image(data)
        assert loaded.getpixel((3, 3)) == (255, 255, 255)
        assert loaded.getpixel((0, 0))[0] == 10


def test_D13_16_bit_gray_is_scaled_not_clipped():
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    values = np.asarray(load_image(encode(Image.fromarray(ramp))))
    assert values.shape == (64, 64, 3)
    assert values[0, 0, 0] == 0 and values[-1, -1, 0] == 255
    assert abs(values.mean() - 127.5) < 0.5
    for other in (Image.fromarray(ramp.astype(np.int32)), Image.fromarray((ramp / 65535).astype(np.float32))):
        np.testing.assert_array_equal(np.asarray(load_image(other)), values)


def test_other_modes_and_the_first_frame():
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    assert load_image(encode(red, "GIF", save_all=True, append_images=[blue])).getpixel((0, 0)) == (255, 0, 0)
    assert load_image(encode(red.convert("CMYK"), "JPEG")).getpixel((4, 4)) == pytest.approx((255, 0, 0), abs=3)
    assert load_image(encode(red.convert("P"))).getpixel((0, 0)) == (255, 0, 0)
    assert load_image(encode(Image.new("1", (8, 8), 1))).getpixel((0, 0)) == (255, 255, 255)
    assert load_image(encode(Image.new("L", (8, 8), 77))).getpixel((0, 0)) == (77, 77, 77)


def test_bad_images_are_named_errors(tmp_path, monkeypatch):
    jpeg = encode(picture(200, 200), "JPEG")
    cut = jpeg[: len(jpeg) // 2]
    assert image_size(cut) == (200, 200)  # the header is whole
    (tmp_path / "notes.png").write_text("hello")
    for value, message in [
        (cut, "truncated"),
        ("none.png", r"none\.png: no such file; relative paths start from .*data\.image_dir"),
        ("notes.png", "cannot identify"),
        (b"", "cannot read image <0 bytes>"),
        ({"picture": "x"}, "expected 'bytes' or 'path'"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,@@@@", "cannot read image data:"),
        ("http://example.com/a.png", "not downloaded"),
        (3, "expected a path"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            load_image(value, tmp_path)
        assert len(str(caught.value)) < 500
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="decompression bomb"):
        image_size(encode(picture(100, 100)))


@pytest.mark.parametrize("factor", [28, 32])
@pytest.mark.parametrize("size", [(332, 27), (26, 28), (27, 29), (1, 1), (1000, 7), (5, 900)])
def test_D09_small_sides_are_scaled_up(factor, size):
    width, height = smart_resize(*size, factor=factor, min_pixels=56 * 56, max_pixels=4194304)
    assert min(width, height) >= factor and width % factor == height % factor == 0


def test_D09_one_pixel_is_56_by_56():
    assert smart_resize(1, 1, factor=28, min_pixels=56 * 56, max_pixels=4194304) == (56, 56)


@pytest.mark.parametrize(("low", "high"), [(262144, 4194304), (3136, 1003520), (784, 20000)])
@pytest.mark.parametrize("factor", [28, 32])
def test_sizes_meet_their_bounds_agree_with_qwen_and_are_a_fixed_point(factor, low, high):
    same, rng = 0, np.random.default_rng(1)
    sizes = [(int(w), int(h)) for w, h in np.exp(rng.uniform(0, np.log(6000), (2000, 2)))]
    sizes = [(w, h) for w, h in sizes if max(w, h) <= 200 * min(w, h)]
    for w, h in sizes:
        bounds = {"factor": factor, "min_pixels": low, "max_pixels": high}
        width, height = smart_resize(w, h, **bounds)
        assert width % factor == height % factor == 0 and low <= width * height <= high
        assert smart_resize(width, height, **bounds) == (width, height)
        # What the sampler's processor makes of the resized image: nothing else.
        assert qwen_smart_resize(height, width, **bounds) == (height, width)
        theirs = qwen_smart_resize(h, w, **bounds)
        if theirs == (height, width):
            same += 1
        else:  # only where theirs breaks a bound
            assert not low <= theirs[0] * theirs[1] <= high or max(theirs) > 200 * min(theirs)
    assert same > 0.85 * len(sizes)


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="300x1 is longer than 200:1"):
        smart_resize(300, 1, factor=28, min_pixels=784, max_pixels=4194304)
    with pytest.raises(ValueError, match="no image size is a multiple of 28 with 100 to 700 pixels"):
        smart_resize(30, 30, factor=28, min_pixels=100, max_pixels=700)


def test_the_processor_changes_no_size_of_ours():
    for processor_class in (transformers.Qwen2VLImageProcessor, transformers.Qwen2VLImageProcessorPil):
        processor = processor_class(size={"shortest_edge": 3136, "longest_edge": 40000})
        image = resize_image(picture(900, 40), factor=28, min_pixels=3136, max_pixels=40000)
        again = processor(images=[image], return_tensors="pt")
        once = processor(images=[image], do_resize=False, return_tensors="pt")
        assert again["image_grid_thw"].tolist() == [[1, image.height // 14, image.width // 14]]
        assert (again["pixel_values"] == once["pixel_values"]).all()


def test_D06_further_forms_of_an_image_decode_to_the_same_pixels(tmp_path):
    buffer = io.BytesIO()
    picture = Image.effect_noise((40, 30), 60).convert("RGB")
    picture.save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    percent = text.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")
    uri = f"data:image/png;base64,{text}"
    for value in (f"\n {text}", f"DATA:image/png;BASE64,{text}", f"data:image/png;base64,{percent}", {"url": uri},
                  {"image": buffer.getvalue()}, {"image": picture, "type": "image"},
                  {"type": "image_url", "image_url": {"url": uri}}):  # fmt: skip
        assert load_image(value).tobytes() == picture.tobytes(), value
        assert image_size(value) == (40, 30)
    with pytest.raises(ImageError, match="expected 'bytes' or 'path' in it, got the keys"):
        load_image({"picture": uri})
