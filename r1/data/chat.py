"""A row's text: format_prompt, system prompt and <image> tags -> chat messages -> the model's chat template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from r1.config import DataConfig

IMAGE_TAG = "<image>"


class RowError(ValueError):
    """A row that cannot become a prompt. Its text is what goes after 'row 17 '."""


class ChatFormat:
    """Writes rows as chat text, with one image placeholder of the model per image."""

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
    ) -> None:
        """Read the templates; ValueError if one is missing or broken."""
        self.config = config
        self.tokenizer = tokenizer
        self.takes_images = processor is not None
        self.chat_template = _chat_template(config, tokenizer, processor)
        self.format_prompt = _format_prompt(config.format_prompt)

    def render(self, row: dict[str, Any], num_images: int) -> str:
        """The row's chat text, up to where the response begins; RowError: no text, or tags that do not match images."""
        text = self.tokenizer.apply_chat_template(
            self._messages(row, num_images),
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(text, str), f"{type(text)=}"
        return text

    def _messages(self, row: dict[str, Any], num_images: int) -> list[dict[str, Any]]:
        """System prompt and one user turn, in typed parts where the row has images."""
        key, content = self.config.prompt_key, row.get(self.config.prompt_key)
        if not isinstance(content, str):
            raise RowError(f"has a {type(content).__name__} in column {key!r} (data.prompt_key); expected text")
        if not content.strip():
            raise RowError(f"has an empty prompt in column {key!r} (data.prompt_key)")
        if self.format_prompt is not None:
            content = self.format_prompt.render(content=content)
        if num_images or self.takes_images:  # for a text model <image> is a word like any other
            self._check_tags(content.count(IMAGE_TAG), num_images)
        user = _split_at_tags(content) if num_images else content
        messages: list[dict[str, Any]] = [{"role": "user", "content": user}]
        if self.config.system_prompt:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return messages

    def _check_tags(self, num_tags: int, num_images: int) -> None:
        if not self.takes_images:
            raise RowError(
                f"has {count_of(num_images, 'image')}, but the model takes text only; choose a vision-language model, "
                "or set data.image_key to a name that is no column"
            )
        if num_tags == num_images:
            return
        if num_tags == 0:
            fix = f"put {IMAGE_TAG} where it belongs, or use a data.format_prompt of '{IMAGE_TAG}{{{{ content }}}}'"
        else:
            fix = f"each {IMAGE_TAG} needs one image in column {self.config.image_key!r} (data.image_key)"
        tags = count_of(num_tags, f"{IMAGE_TAG} tag")
        raise RowError(f"has {tags} in the prompt but {count_of(num_images, 'image')}; {fix}")


def count_of(number: int, noun: str) -> str:
    """'1 image', '2 images'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _split_at_tags(content: str) -> Sequence[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(IMAGE_TAG)):
        if i > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _format_prompt(path: str | None) -> jinja2.Template | None:
    if path is None:
        return None
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    try:
        source = Path(path).read_text(encoding="utf-8").strip()
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except (OSError, jinja2.TemplateError) as error:
        raise ValueError(f"data.format_prompt: cannot use {path}: {error}") from error
    if names != {"content"}:
        raise ValueError(
            f"data.format_prompt: {path} uses {sorted(names) or 'nothing'}; expected {{{{ content }}}} alone"
        )
    return environment.from_string(source)


def _chat_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None) -> str:
    if config.override_chat_template is not None:
        try:
            return Path(config.override_chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"data.override_chat_template: cannot read it: {error}") from error
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    if isinstance(template, dict):  # several by name
        template = template.get("default")
    if not template:
        raise ValueError(
            "the tokenizer has no chat template (base models often lack one); set data.override_chat_template"
        )
    return template
