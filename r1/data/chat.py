"""A row's text: system prompt, format_prompt and <image> tags -> chat messages -> the model's chat template."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from r1.config import DataConfig
from r1.data.faults import RowError
from r1.data.messages import TAGS, Message, escape, read_prompt, split_at_tags, unescape

__all__ = ["ChatFormat", "RowError", "count_of"]


class ChatFormat:
    """Writes rows as chat text, with one placeholder of the model per image or video."""

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
    ) -> None:
        """Read the templates; ValueError if one is missing or broken, or does not use data.chat_template_kwargs."""
        self.config = config
        self.tokenizer = tokenizer
        self.takes_images = processor is not None
        self.chat_template = _chat_template(config, tokenizer, processor)
        self.format_prompt = _format_prompt(config.format_prompt)
        for name in config.chat_template_kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", self.chat_template):
                raise ValueError(
                    f"data.chat_template_kwargs has {name!r}, which the chat template does not use; take it out, "
                    "or choose a model or data.override_chat_template that does"
                )

    def messages(self, row: dict[str, Any]) -> list[Message]:
        """The row's turns as they stand in the data; RowError: no prompt."""
        return read_prompt(row.get(self.config.prompt_key), self.config.prompt_key)

    def render(self, messages: list[Message], num_media: Mapping[str, int]) -> str:
        """The chat text of messages, up to where the response begins.

        Args:
            num_media: how many images ("image") and videos ("video") the row has.

        Raises:
            RowError: tags that do not match images or videos, or turns that the chat template refuses.
        """
        variables: dict[str, Any] = dict(self.config.chat_template_kwargs)
        try:
            text = self.tokenizer.apply_chat_template(
                self._chat(messages, num_media),
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=True,
                **variables,
            )
        except jinja2.TemplateError as error:
            fix = "see which turns it takes, or set data.override_chat_template"
            raise RowError("chat template refuses it", f"does not fit the chat template ({error})", fix) from error
        assert isinstance(text, str), f"{type(text)=}"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            fix = "write the whole character (\\ud83d\\ude00) or take it out"
            raise RowError("prompt is not valid Unicode", "has half a surrogate pair in its prompt", fix) from error
        return text

    def _chat(self, messages: list[Message], num_media: Mapping[str, int]) -> list[dict[str, Any]]:
        """Turns for the chat template, in typed parts where they hold images or videos."""
        turns = [(m.role, m.text) for m in messages]
        if self.config.system_prompt and turns[0][0] != "system":
            turns.insert(0, ("system", escape(self.config.system_prompt)))
        if self.format_prompt is not None:
            last = max((i for i, (role, _) in enumerate(turns) if role == "user"), default=None)
            if last is not None:
                turns[last] = ("user", self.format_prompt.render(content=turns[last][1]))
        # For a text model <image> is a word like any other, and so is <video> in rows without videos.
        tags = [name for name in TAGS if num_media.get(name) or (name == "image" and self.takes_images)]
        for name in tags:
            found = sum(text.count(TAGS[name]) for _, text in turns)
            self._check_tags(name, found, num_media.get(name, 0))
        chat = []
        for role, text in turns:
            is_split = any(TAGS[name] in text for name in tags)
            chat.append({"role": role, "content": split_at_tags(text, tags) if is_split else unescape(text)})
        return chat

    def _check_tags(self, name: str, num_tags: int, count: int) -> None:
        tag, key = TAGS[name], f"data.{name}_key"
        if not self.takes_images:
            raise RowError(
                f"{name} for a text model",
                f"has {count_of(count, name)}, but the model takes text only",
                f"choose a vision-language model, or set {key} to a name that is no column",
            )
        if num_tags == count:
            return
        if num_tags == 0:
            fix = f"put {tag} where it belongs, or use a data.format_prompt of '{tag}{{{{ content }}}}'"
        else:
            column = getattr(self.config, f"{name}_key")
            fix = f"each {tag} needs one {name} in column {column!r} ({key})"
        tags = count_of(num_tags, f"{tag} tag")
        raise RowError(f"{name}s and tags differ", f"has {tags} in the prompt but {count_of(count, name)}", fix)


def count_of(number: int, noun: str) -> str:
    """'1 image', '2 images'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _format_prompt(path: str | None) -> jinja2.Template | None:
    if path is None:
        return None
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    try:
        source = Path(path).read_text(encoding="utf-8-sig").strip()
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
            return Path(config.override_chat_template).read_text(encoding="utf-8-sig")
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
