"""The forms a prompt has in a row (text, or chat messages) -> messages whose text marks the places of images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from r1.data.faults import RowError

TAGS = {"image": "<image>", "video": "<video>"}
ROLES = ("system", "user", "assistant", "tool")
_MARK = "\ue9a1"  # of a private range: "<image>" that is text is kept as "<", this, "image>" until the tags are read


@dataclass(slots=True)
class Message:
    """One turn. In its text a tag is the place of an image or video; one that is mere text is escaped."""

    role: str
    text: str
    inline: list[tuple[str, Any]] = field(default_factory=list)  # (image or video, value) given inside the message


def read_prompt(cell: Any, key: str) -> list[Message]:
    """The messages of a prompt cell.

    In text by the user, or of a prompt that is one string, tags are places. They are mere text in system, assistant
    and tool turns, and in typed parts, where {"type": "image"} marks the place.

    Args:
        cell: a string, or a list of {"role", "content"}; content is a string or a list of typed parts.
        key: the column's name, for messages.

    Raises:
        RowError: no prompt in it.
    """
    if isinstance(cell, str):
        messages = [Message(role="user", text=cell)]
    elif isinstance(cell, list):
        messages = [_read_message(turn, i) for i, turn in enumerate(cell)]
    else:
        problem = f"has a {type(cell).__name__} in column {key!r} (data.prompt_key)"
        raise RowError("prompt is not text", problem, "expected text or a list of chat messages")
    if not messages:
        raise RowError("prompt is empty", f"has an empty prompt in column {key!r} (data.prompt_key)")
    last = messages[-1]
    if last.role not in ("user", "tool"):
        raise RowError(
            "prompt does not end with the user",
            f"has a prompt that ends with a turn by the {last.role}",
            "a prompt ends where the response begins: leave that turn out, its text may go into data.answer_key",
        )
    if not last.text.strip():
        raise RowError("prompt is empty", f"has an empty prompt in column {key!r} (data.prompt_key)")
    return messages


def escape(text: str) -> str:
    """text, with its tags as mere text."""
    for tag in TAGS.values():
        text = text.replace(tag, f"<{_MARK}{tag[1:]}")
    return text


def unescape(text: str) -> str:
    return text.replace(f"<{_MARK}", "<")


def split_at_tags(text: str, tags: Sequence[str]) -> list[dict[str, str]]:
    """Typed parts for a chat template: text, {"type": "image"}, text …"""
    names = {TAGS[name]: name for name in tags}
    parts: list[dict[str, str]] = []
    while text:
        at, tag = min(((text.find(tag), tag) for tag in names if tag in text), default=(len(text), ""))
        if at:
            parts.append({"type": "text", "text": unescape(text[:at])})
        if tag:
            parts.append({"type": names[tag]})
        text = text[at + len(tag) :]
    return parts


def _read_message(turn: Any, i: int) -> Message:
    kind = "message is malformed"
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        keys = f"the keys {list(turn)}" if isinstance(turn, dict) else f"a {type(turn).__name__}"
        raise RowError(kind, f"has {keys} as message {i}", 'expected {"role": …, "content": …}')
    role, content = turn["role"], turn["content"]
    if role not in ROLES:
        raise RowError(kind, f"has the role {str(role)[:40]!r} in message {i}", f"expected one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return Message(role=role, text=content if role == "user" else escape(content))
    if not isinstance(content, list):
        problem = f"has a {type(content).__name__} as content of message {i}"
        raise RowError(kind, problem, "expected text or a list of typed parts")
    message = Message(role=role, text="")
    for part in content:
        _add_part(message, part, i)
    return message


def _add_part(message: Message, part: Any, i: int) -> None:
    if isinstance(part, str):
        message.text += escape(part)
        return
    name = part.get("type") if isinstance(part, dict) else None
    if name == "text" and isinstance(part.get("text"), str):
        message.text += escape(part["text"])
    elif name in ("image", "image_url", "video", "video_url"):
        name = name.removesuffix("_url")
        message.text += TAGS[name]
        if (value := _inline_value(part, name)) is not None:
            message.inline.append((name, value))
    else:
        shown = f"type {str(name)[:40]!r}" if isinstance(part, dict) else type(part).__name__
        raise RowError(
            "message is malformed",
            f"has a content part of {shown} in message {i}",
            'expected {"type": "text", "text": …}, {"type": "image"} or {"type": "video"}',
        )


def _inline_value(part: dict[str, Any], name: str) -> Any:
    for key in (name, f"{name}_url", "url", "path", "base64"):
        value = part.get(key)
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        if value is not None:
            return value
    return None
