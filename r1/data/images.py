"""Any form of an image -> RGB, upright, at the size that the model sees.

One decode and one resize give the pixels of both the trainer and the sampler.
"""

import base64
import binascii
import io
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from r1.data.faults import ImageError

MAX_ASPECT = 200  # the Qwen-VL processors refuse longer images
INSIDE = ("bytes", "path", "image", "image_url", "url")  # keys of a dict for an image, as data sets have them
UNKNOWN = "not a form of an image"
ORIENTATION = 0x0112  # EXIF tag; values above 4 turn the image by 90 degrees
MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")
# What Pillow's readers raise on broken files, decompression bombs included.
READ_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def list_images(value: Any) -> list[Any]:
    """The images in a row's cell: a list, one image, or nothing (None, NaN, an empty string or list)."""
    if isinstance(value, (list, tuple)):
        return [item for item in value if not _is_empty(item)]
    return [] if _is_empty(value) else [value]


def load_image(value: Any, image_dir: Path | None = None) -> Image.Image:
    """Decode an image to RGB.

    EXIF orientation is applied, transparency is laid on white, 16-bit values are scaled to 8, and an animation gives
    its first frame.

    Args:
        value: path, file URI, data URI, base64 text, bytes, {"bytes", "path"}, one of these as {"image"} or
            {"image_url": {"url"}}, or a PIL image.
        image_dir: folder that relative paths start from; None: the current one.

    Raises:
        ImageError: no such file, not an image, cut short, or too large to be an honest picture (Pillow's limit).
    """
    try:
        with _open(value, image_dir) as image:
            orientation = _orientation(image)
            image.load()
            upright = ImageOps.exif_transpose(image) if orientation > 1 else image
            rgb = _to_rgb(upright)
    except READ_ERRORS as error:
        raise _fault(value, error) from error
    rgb.info = {}  # no EXIF left that a later reader could apply again
    return rgb


def image_size(value: Any, image_dir: Path | None = None) -> tuple[int, int]:
    """(width, height) in pixels of what load_image would return, from the file's header alone.

    Raises:
        ImageError: as load_image, except for damage behind the header.
    """
    try:
        if isinstance(value, Image.Image):
            image = value
            width, height = image.size
            return (height, width) if _orientation(image) > 4 else (width, height)
        with _open(value, image_dir) as image:
            width, height = image.size
            return (height, width) if _orientation(image) > 4 else (width, height)
    except READ_ERRORS as error:
        raise _fault(value, error) from error


def smart_resize(width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size at which the model sees an image; applied to its own result it changes nothing.

    Both sides are multiples of factor, width * height lies in [min_pixels, max_pixels], and the aspect ratio is kept
    as well as that allows. Equal to the Qwen-VL processors' formula wherever that one meets these bounds; for long
    thin images it does not, and would give another size when applied again by the sampler's processor.

    Raises:
        ImageError: aspect ratio above 200.
        ValueError: no size of that kind has so many pixels.
    """
    if max(width, height) > MAX_ASPECT * min(width, height):
        problem = f"an image of {width}x{height} is longer than {MAX_ASPECT}:1, which the model cannot take"
        raise ImageError("image too long and thin", problem, "crop it")
    w, h = (round(side / factor) * factor for side in (width, height))  # 0 for a thin side: then scaled by min_pixels
    if w * h > max_pixels:
        scale = math.sqrt(width * height / max_pixels)
        w, h = (max(1, math.floor(side / scale / factor)) * factor for side in (width, height))
    elif w * h < min_pixels:
        scale = math.sqrt(min_pixels / (width * height))
        w, h = (math.ceil(side * scale / factor) * factor for side in (width, height))
    if min_pixels <= w * h <= max_pixels and max(w, h) <= MAX_ASPECT * min(w, h):
        return w, h
    return _nearest_size(width, height, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)


def resize_image(image: Image.Image, *, factor: int, min_pixels: int, max_pixels: int) -> Image.Image:
    """Resize an image to smart_resize's size, bicubic as the Qwen-VL processors do."""
    return resized(image, smart_resize(*image.size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels))


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image at a size, bicubic as the Qwen-VL processors do."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def describe(value: Any) -> str:
    """A short name of an image for messages and logs; never its bytes."""
    if isinstance(value, dict):
        return describe(next((value[key] for key in ("path", *INSIDE) if value.get(key)), None))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"<{len(value)} bytes>"
    if isinstance(value, (str, Path)):
        text = str(value)
        return text if len(text) <= 200 else f"{text[:40]}… ({len(text)} characters)"
    return f"<{type(value).__name__}>"


def _fault(value: Any, error: BaseException) -> ImageError:
    """What Pillow or _open said about an image, with a kind to count it by."""
    if isinstance(error, ImageError):
        return ImageError(error.kind, f"cannot read image {describe(value)}: {error.problem}", error.fix)
    text = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        kind, fix = "image has too many pixels", "scale it down"
    elif isinstance(error, UnidentifiedImageError):
        kind, text, fix = "not an image", "cannot identify its format", "convert it to PNG or JPEG"
    elif "truncated" in text.lower() or "broken data stream" in text:
        kind, fix = "image cut short", "fetch it again, or drop the row"
    else:
        kind, fix = "image damaged", "fetch it again, or drop the row"
    return ImageError(kind, f"cannot read image {describe(value)}: {text}", fix)


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return value.keys() <= {"bytes", "path"} and value.get("bytes") is None and not value.get("path")
    if isinstance(value, (str, list, tuple)):
        return len(value) == 0
    return value is None or (isinstance(value, float) and math.isnan(value))


def _open(value: Any, image_dir: Path | None) -> Image.Image:
    """Open an image without decoding it."""
    if isinstance(value, Image.Image):
        return value.copy()  # several threads may hold the row's own image
    if isinstance(value, dict):
        inside = next((value[key] for key in INSIDE if value.get(key)), None)
        if inside is None:
            raise ImageError(UNKNOWN, f"expected 'bytes' or 'path' in it, got the keys {list(value)}")
        return _open(inside, image_dir)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Image.open(io.BytesIO(value))
    if isinstance(value, np.ndarray):
        return Image.fromarray(value)
    if isinstance(value, Path):
        return Image.open(_find(str(value), image_dir))
    if not isinstance(value, str):
        raise ImageError(UNKNOWN, "expected a path, URI, base64 text, bytes, {bytes, path} or PIL image")
    return _open_text(value, image_dir)


def _open_text(value: str, image_dir: Path | None) -> Image.Image:
    if value[:5].lower() == "data:":
        header, comma, data = value.partition(",")
        if not comma or not header.lower().endswith(";base64"):
            raise ImageError("bad data URI", "a data URI must read data:image/…;base64,…")
        return Image.open(io.BytesIO(_decode_base64(unquote(data))))
    if value.startswith("file:"):
        return Image.open(_find(unquote(urlsplit(value).path), image_dir))
    if value.startswith(("http://", "https://")):
        raise ImageError("image on the web", "images are not downloaded", "fetch it first and give its path")
    if not os.path.exists(_join(value, image_dir)) and _is_base64_image(value):
        return Image.open(io.BytesIO(_decode_base64(value)))
    return Image.open(_find(value, image_dir))


def _join(path: str, image_dir: Path | None) -> str:
    return os.path.join(image_dir or "", path)


def _find(path: str, image_dir: Path | None) -> str:
    full = _join(path, image_dir)
    if not os.path.isfile(full):
        start = "" if os.path.isabs(path) else f"relative paths start from {image_dir or Path.cwd()} (data.image_dir)"
        is_folder = os.path.isdir(full)
        raise ImageError("no such image file", "it is a folder" if is_folder else "no such file", start)
    return full


def _is_base64_image(text: str) -> bool:
    try:
        return base64.b64decode(text.lstrip()[:16]).startswith(MAGIC)
    except (binascii.Error, ValueError):
        return False


def _decode_base64(text: str) -> bytes:
    data = "".join(text.split()).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(data + "=" * (-len(data) % 4), validate=True)
    except ValueError as error:  # binascii.Error, or characters that are not ASCII
        raise ImageError("bad base64", f"it is not base64 ({error})", "encode it again") from error


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation still to be applied, 1 to 8; 1 is upright."""
    if image.format == "TIFF":  # Pillow turns these itself, sizes in the header included
        return 1
    try:
        # Not image.getexif(): for a PNG that decodes the whole picture to look for EXIF behind it.
        value = Image.Image.getexif(image).get(ORIENTATION, 1)
    except READ_ERRORS:  # broken EXIF: take the picture as it lies
        return 1
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        return _scale_to_8_bits(image).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    """Gray of 16 or 32 bits or floats, scaled by the range it is in: convert() would clip all above 255 to white."""
    values = np.nan_to_num(np.asarray(image).astype(np.float64))
    top = values.max(initial=0)
    if image.mode.startswith("I;16"):
        limit = 65535.0
    elif image.mode == "F" and top <= 1:
        limit = 1.0
    else:
        limit = next((bound for bound in (255.0, 65535.0) if top <= bound), top)
    return Image.fromarray(np.rint(values.clip(0, limit) * (255 / limit)).astype(np.uint8))


def _nearest_size(width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Among the sizes that meet smart_resize's bounds, the one nearest in aspect ratio, then in pixels."""
    long, short = max(width, height), min(width, height)
    cells_min, cells_max = -(-min_pixels // factor**2), max_pixels // factor**2
    choices = []
    for a in range(1, math.isqrt(cells_max) + 1):  # short side in units of factor; b is the long one
        low, high = max(a, -(-cells_min // a)), min(cells_max // a, MAX_ASPECT * a)
        if low <= high:
            b = min(max(round(a * long / short), low), high)
            stretch = abs(math.log(b / a) - math.log(long / short))
            choices.append((stretch, abs(math.log(a * b * factor**2 / (width * height))), a, b))
    if not choices:
        raise ValueError(
            f"no image size is a multiple of {factor} with {min_pixels} to {max_pixels} pixels; "
            f"widen data.min_pixels and data.max_pixels"
        )
    _, _, a, b = min(choices)
    return (b * factor, a * factor) if width >= height else (a * factor, b * factor)
