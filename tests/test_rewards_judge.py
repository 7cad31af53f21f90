"""The judge helper against a server on this machine's loopback."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from r1.config import RewardConfig
from r1.rewards.judge import Judge, JudgeError
from r1.rewards.runner import RewardRunner


class Endpoint(ThreadingHTTPServer):
    """Replies `echo: <message>`, after the statuses that were queued; remembers what it saw."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.seen: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.in_flight = self.most_in_flight = 0
        self.delay_s = 0.0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append({"path": self.path, **body})
            self.server.headers.append(self.headers.get("Authorization"))
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            status = self.server.statuses.pop(0) if self.server.statuses else 200
        time.sleep(self.server.delay_s)
        with self.server.lock:
            self.server.in_flight -= 1
        reply = {"choices": [{"message": {"content": "echo: " + body["messages"][-1]["content"]}}]}
        data = json.dumps(reply if status == 200 else {"error": "no"} if status != 201 else {}).encode()
        self.send_response(200 if status == 201 else status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = Endpoint()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_asks_and_sends_what_it_is_given(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    judge = Judge(endpoint.url, "m", api_key_variable="MY_KEY", sampling={"max_tokens": 5})
    assert judge.ask("good?") == "echo: good?"
    assert judge.ask([{"role": "system", "content": "be fair"}, {"role": "user", "content": "bad?"}]) == "echo: bad?"
    assert endpoint.seen[0] == {"path": "/v1/chat/completions", "model": "m", "temperature": 0.0, "max_tokens": 5,
                                "messages": [{"role": "user", "content": "good?"}]}  # fmt: skip
    assert endpoint.headers == ["Bearer secret"] * 2


def test_retries_what_may_pass_and_nothing_else(endpoint: Endpoint) -> None:
    judge = Judge(endpoint.url, "m", retries=2, wait_s=0.01)
    endpoint.statuses = [503, 429]
    assert judge.ask("a") == "echo: a" and len(endpoint.seen) == 3
    endpoint.statuses = [500, 500, 500]
    with pytest.raises(JudgeError, match="no reply in 3 attempts; the last: status 500"):
        judge.ask("b")
    endpoint.statuses, endpoint.seen = [401], []
    with pytest.raises(JudgeError, match="answered with status 401"):
        judge.ask("c")
    assert len(endpoint.seen) == 1
    endpoint.statuses = [201]
    with pytest.raises(JudgeError, match="is no chat completion"):
        judge.ask("d")


def test_time_limit_and_dead_endpoints(endpoint: Endpoint) -> None:
    endpoint.delay_s = 0.5
    start = time.monotonic()
    with pytest.raises(JudgeError, match=r"in 2 attempts; the last: .*[Tt]ime"):
        Judge(endpoint.url, "m", timeout_s=0.1, retries=1, wait_s=0.01).ask("a")
    assert time.monotonic() - start < 5
    with pytest.raises(JudgeError, match="Connection refused"):
        Judge("http://127.0.0.1:9/v1", "m", retries=0).ask("a")


def test_asks_many_at_once_up_to_the_cap_and_keeps_their_order(endpoint: Endpoint) -> None:
    endpoint.delay_s, endpoint.statuses = 0.05, [400]
    replies = Judge(endpoint.url, "m", concurrency=4).ask_all([str(i) for i in range(12)])
    assert replies.count(None) == 1 and [r for r in replies if r] == [f"echo: {i}" for i, r in enumerate(replies) if r]
    assert endpoint.most_in_flight == 4


def test_a_reward_that_asks_a_judge(endpoint: Endpoint, tmp_path: Path) -> None:
    path = tmp_path / "judged.py"
    path.write_text(
        "from r1.rewards.judge import Judge\n"
        "judge = None\n"
        "def main(rows, url):\n"
        "    global judge\n"
        "    judge = judge or Judge(url, 'm', retries=0)\n"
        "    replies = judge.ask_all([row['response'] for row in rows])\n"
        "    return [{'overall': None if reply is None else float('good' in reply)} for reply in replies]\n"
    )
    settings = RewardConfig(function=str(path), kwargs={"url": endpoint.url}, num_workers=1)
    with RewardRunner(settings) as runner:
        assert runner.submit([{"response": r} for r in ("good", "bad")]).result() == [
            {"overall": 1.0},
            {"overall": 0.0},
        ]
        endpoint.statuses = [400]
        assert runner.submit([{"response": "good"}]).result() == [None]
