"""A video in any form -> frames sampled at a rate, with the times they were taken at."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from PIL import Image

from r1.data.faults import ImageError
from r1.data.images import describe, image_size, list_images, load_image

FRAME_KINDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
FORMS = "expected a path, URI, {bytes, path} or list of frames"


@dataclass(frozen=True, kw_only=True, slots=True)
class Footage:
    """Which frames of a video are taken; all that is known without decoding them."""

    size: tuple[int, int]  # (width, height) of a frame
    total: int  # frames of the whole video
    fps: float  # of the whole video
    indices: tuple[int, ...]  # of the frames taken; an even number, as the models look at pairs

    @property
    def metadata(self) -> dict[str, Any]:
        """As transformers' and vLLM's processors take it."""
        return {
            "fps": self.fps,
            "duration": self.total / self.fps,
            "total_num_frames": self.total,
            "frames_indices": list(self.indices),
            "video_backend": "opencv",
        }


def list_videos(cell: Any) -> list[Any]:
    """The videos in a row's cell: one, or a list of them. A list of pictures is one video, given as its frames."""
    values = list_images(cell)
    return [values] if values and isinstance(cell, (list, tuple)) and all(map(_is_frame, values)) else values


def sample_frames(total: int, source_fps: float, *, fps: float, max_frames: int) -> tuple[int, ...]:
    """Positions of frames spread evenly over a video: an even number, at most max_frames, near fps a second."""
    wanted = min(round(total / source_fps * fps), max_frames, total)
    count = max(2, wanted - wanted % 2)
    return tuple(round(i * (total - 1) / (count - 1)) for i in range(count))


def inspect_video(value: Any, folder: Path | None, *, fps: float, max_frames: int) -> Footage:
    """What load_video would give, from the header and the first frame.

    Args:
        value: path, file URI, {"bytes", "path"}, or a list of frames in any form that load_image reads, which are
            taken to be `fps` a second.
        folder: that relative paths start from.
        fps: frames to take a second.
        max_frames: most frames to take.

    Raises:
        ImageError: no such file, not a video, or a frame that cannot be read.
    """
    if isinstance(value, (list, tuple)):
        if not value:
            raise ImageError("not a form of a video", "a video is an empty list", FORMS)
        size, total, source_fps = image_size(value[0], folder), len(value), fps
    else:
        with _opened(value, folder) as capture:
            import cv2

            total, source_fps = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), float(capture.get(cv2.CAP_PROP_FPS))
            ok, frame = capture.read()
            if not ok or total < 1 or not 0 < source_fps < math.inf:
                raise ImageError("not a video", f"cannot read a frame of video {describe(value)}", "encode it again")
            size = (frame.shape[1], frame.shape[0])
    return Footage(
        size=size,
        total=total,
        fps=source_fps,
        indices=sample_frames(total, source_fps, fps=fps, max_frames=max_frames),
    )


def load_video(value: Any, folder: Path | None, footage: Footage) -> list[Image.Image]:
    """Decode the frames that footage names, to RGB.

    Raises:
        ImageError: as inspect_video, or the file ends before one of them.
    """
    if isinstance(value, (list, tuple)):
        frames = {i: load_image(value[i], folder) for i in set(footage.indices)}
        if any(frame.size != footage.size for frame in frames.values()):
            frames = {i: frame.resize(footage.size, Image.Resampling.BICUBIC) for i, frame in frames.items()}
    else:
        with _opened(value, folder) as capture:
            frames = dict(_read(capture, set(footage.indices)))
    missing = [i for i in footage.indices if i not in frames]
    if missing:
        problem = f"video {describe(value)} ends before frame {missing[0]} of {footage.total}"
        raise ImageError("video cut short", problem, "fetch it again, or drop the row")
    return [frames[i] for i in footage.indices]


def _read(capture: Any, wanted: set[int]) -> Iterator[tuple[int, Image.Image]]:
    import cv2

    for i in range(max(wanted) + 1):
        if not capture.grab():
            return
        if i in wanted:
            ok, frame = capture.retrieve()
            if not ok:
                return
            yield i, Image.fromarray(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))


@contextmanager
def _opened(value: Any, folder: Path | None) -> Iterator[Any]:
    """An open cv2.VideoCapture."""
    try:
        import cv2
    except ImportError as error:
        raise ValueError(f"video files are read with OpenCV ({error}); pip install opencv-python-headless") from error
    with _as_file(value, folder) as path:
        capture = cv2.VideoCapture(path)
        try:
            if not capture.isOpened():
                raise ImageError("not a video", f"cannot read video {describe(value)}", "convert it to MP4 (H.264)")
            yield capture
        finally:
            capture.release()


@contextmanager
def _as_file(value: Any, folder: Path | None) -> Iterator[str]:
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, (bytes, bytearray)):
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:  # OpenCV reads files only
            file.write(value)
            file.flush()
            yield file.name
        return
    if not isinstance(value, (str, Path)):
        raise ImageError("not a form of a video", f"cannot read video {describe(value)}: {FORMS}")
    text = str(value)
    if text.startswith(("http://", "https://")):
        raise ImageError("video on the web", f"video {describe(value)} is not downloaded", "fetch it, give its path")
    if text.startswith("file:"):
        text = unquote(text.removeprefix("file:").removeprefix("//localhost").removeprefix("//"))
    path = os.path.join(folder or "", text)
    if "\0" in path or not os.path.isfile(path):
        fix = f"relative paths start from {folder or Path.cwd()} (data.image_dir)"
        raise ImageError("no such video file", f"cannot read video {describe(value)}: no such file", fix)
    yield path


def _is_frame(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_frame(value["path"]) if value.get("path") else isinstance(value.get("bytes"), bytes)
    if isinstance(value, (str, Path)):
        text = str(value)
        return text.startswith("data:image/") or Path(text).suffix.lower() in FRAME_KINDS
    return isinstance(value, Image.Image)
