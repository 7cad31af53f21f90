"""Ask a language model behind an OpenAI-compatible chat endpoint, from a reward function of yours.

It is no reward function: what to ask and how to read the reply is yours. README, "Your reward", has an example.
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


class JudgeError(RuntimeError):
    """The endpoint refused, or gave no reply after all retries."""


class Judge:
    """A chat endpoint with a time limit per request, retries and a cap on requests in flight.

    Args:
        url: up to and with the version, as in http://localhost:8000/v1.
        model: its name there.
        api_key_variable: environment variable that holds the key; an unset one sends none.
        timeout_s: of one request; keep timeout_s * (retries + 1) below reward.timeout_s.
        retries: further attempts after a failed connection, a time-out or a status of RETRIED.
        wait_s: before the first retry; it doubles each time, and a Retry-After header lengthens it.
        concurrency: requests in flight; times reward.num_workers times ranks is what the endpoint sees.
        sampling: further fields of the request, such as temperature or max_tokens.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_variable: str = "OPENAI_API_KEY",
        timeout_s: float = 20.0,
        retries: int = 2,
        wait_s: float = 0.5,
        concurrency: int = 16,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self._url = url.rstrip("/") + "/chat/completions"
        self._body = {"model": model, "temperature": 0.0, **(sampling or {})}
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get(api_key_variable):
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s, self._retries, self._wait_s = timeout_s, retries, wait_s
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="judge")

    def ask(self, message: str | Sequence[dict[str, Any]]) -> str:
        """The reply to a user message, or to a list of chat messages.

        Raises:
            JudgeError: no reply after all retries, a status that no retry mends, or a reply in another form.
        """
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else list(message)
        data = json.dumps({**self._body, "messages": messages}).encode()
        for attempt in range(self._retries + 1):
            wait_s = self._wait_s * 2**attempt * random.uniform(1.0, 1.25)  # not all at the same moment again
            try:
                request = urllib.request.Request(self._url, data, self._headers)
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    return _reply(response.read())
            except urllib.error.HTTPError as error:
                fault = f"status {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code not in RETRIED:
                    raise JudgeError(f"{self._url} answered with {fault}") from error
                wait_s = max(wait_s, _seconds(error.headers.get("Retry-After")))
            except (OSError, HTTPException) as error:  # connections, time-outs, replies cut short
                fault = f"{type(error).__name__}: {error}"
            if attempt < self._retries:
                time.sleep(wait_s)
        raise JudgeError(f"{self._url} gave no reply in {self._retries + 1} attempts; the last: {fault}")

    def ask_all(self, messages: Sequence[str | Sequence[dict[str, Any]]]) -> list[str | None]:
        """Replies in order, asked at once; None where ask raises, which as a reward excludes its response."""
        return list(self._pool.map(self._ask_or_none, messages))

    def _ask_or_none(self, message: str | Sequence[dict[str, Any]]) -> str | None:
        try:
            return self.ask(message)
        except JudgeError:
            return None


def _seconds(retry_after: str | None) -> float:
    return min(float(retry_after), 60.0) if retry_after and retry_after.isdigit() else 0.0


def _reply(body: bytes) -> str:
    try:
        return str(json.loads(body)["choices"][0]["message"]["content"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise JudgeError(f"the reply is no chat completion: {body[:200]!r}") from error
