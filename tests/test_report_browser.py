"""The report in a real browser: no errors, tables sort and filter, pictures show, nothing a model wrote runs."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from r1.report.page import write_report
from tests.test_report import EVIL, make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this host (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "one")


class Visit:
    """A page that was opened, and everything that went wrong in it."""

    def __init__(self, browser: "Browser", path: Path, **options: Any) -> None:
        self.errors: list[str] = []
        self.page: Page = browser.new_page(**options)
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else self.errors.append(r.url))
        self.page.goto(path.absolute().as_uri())

    def column(self, number: int) -> list[str]:
        return self.page.locator(f".samples tbody td:nth-child({number})").all_inner_texts()


def test_the_page_draws_itself_without_an_error_or_a_request(browser: "Browser", folder: Path) -> None:
    visit = Visit(browser, folder / "report.html")
    page = visit.page
    assert page.title() == "one"
    assert page.locator(".chart").count() == 9
    assert page.locator(".chart path.curve").count() == 11 and page.locator(".chart path.area").count() == 3
    assert "NaN" not in page.locator("main").inner_html()
    page.locator(".chart svg").first.hover()
    page.wait_for_timeout(100)
    assert page.locator(".chart .cross").count() == 8, "the cross-hair stands in every chart that has this step"
    page.locator("#bar select").select_option("hours")
    # 12 steps of 6 or 7 s are 0.02 hours.
    assert "0.02" in (page.locator(".chart svg").nth(2).text_content() or "")
    assert visit.errors == []


def test_a_response_that_holds_a_script_is_text(browser: "Browser", folder: Path) -> None:
    visit = Visit(browser, folder / "report.html")
    visit.page.get_by_label("search samples").fill("onerror")
    assert visit.page.locator(".samples tbody tr").count() == 1
    assert visit.column(6)[0].startswith(EVIL)
    assert visit.page.title() == "one" and visit.page.locator("img[src=x]").count() == 0 and visit.errors == []


def test_samples_sort_filter_and_show_their_pictures(browser: "Browser", folder: Path) -> None:
    visit = Visit(browser, folder / "report.html")
    page = visit.page
    assert page.locator(".tools output").inner_text() == "48 of 48"
    assert visit.column(2)[0] == "12", "the latest step comes first"
    page.get_by_role("button", name="tokens").click()
    assert visit.column(9)[0] == "203"
    page.get_by_role("button", name="tokens").click()
    assert visit.column(9)[0] == "200"
    page.get_by_role("button", name="reward").click()
    assert [text.split()[0] for text in visit.column(8)[:12]] == ["1"] * 12
    page.get_by_label("which samples").select_option("worst of each step")
    assert page.locator(".samples tbody tr").count() == 12
    page.get_by_label("which samples").select_option("without a reward")
    assert all("failed" in text for text in visit.column(8))
    page.get_by_label("which samples").select_option("all samples")
    page.get_by_label("step", exact=True).select_option("step 3")
    page.get_by_label("search samples").fill("RESPONSE 2 OF STEP 3")
    assert len(visit.column(6)) == 1 and page.locator(".samples mark").inner_text() == "response 2 of step 3"
    page.get_by_label("search samples").fill("")
    sizes = page.locator(".pictures img").evaluate_all("images => images.map(i => [i.complete, i.naturalWidth])")
    assert sizes == [[True, 64]] * 2
    page.locator(".pictures button").first.click()
    assert page.locator("dialog img").is_visible()
    page.locator("dialog").click()
    page.locator("dialog").wait_for(state="detached")
    assert visit.errors == []


def test_long_responses_open(browser: "Browser", folder: Path) -> None:
    page = Visit(browser, folder / "report.html").page
    box = page.locator(".text.short").first
    before = box.bounding_box()
    page.get_by_role("button", name="show all").first.click()
    after = page.locator(".samples .text").nth(4).bounding_box()
    assert before is not None and after is not None
    assert page.get_by_role("button", name="show less").count() == 1


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(browser: "Browser", folder: Path, width: int) -> None:
    visit = Visit(browser, folder / "report.html", viewport={"width": width, "height": 800})
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width and visit.errors == []


def test_dark_follows_the_system_until_the_reader_chooses(browser: "Browser", folder: Path) -> None:
    page = Visit(browser, folder / "report.html", color_scheme="dark").page
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(17, 21, 26)"
    page.locator("#theme").click()
    assert page.evaluate(background) == "rgb(246, 247, 249)"
    page.reload()
    assert page.evaluate(background) == "rgb(246, 247, 249)", "the choice is remembered"


def test_runs_lie_on_top_of_each_other(browser: "Browser", folder: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "two", num_steps=6, shift=-0.2, lr=1e-5)
    write_report([folder, other], tmp_path / "both.html")
    visit = Visit(browser, tmp_path / "both.html")
    reward = visit.page.locator(".chart", has_text="Reward").first
    assert reward.locator("path.curve").count() == 4  # mean and accuracy of each
    assert "mean · one" in reward.inner_text() and "mean · two" in reward.inner_text()
    assert "trainer.max_steps" in visit.page.locator("#settings").inner_text()
    visit.page.get_by_label("run", exact=True).select_option("two")
    assert visit.page.locator(".samples tbody tr").count() == 24 and visit.errors == []


def test_the_page_of_a_run_that_goes_on_follows_it_and_keeps_its_place(browser: "Browser", tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", num_steps=4)
    output = tmp_path / "live.html"
    write_report([folder], output, refresh_s=1)
    page = Visit(browser, output).page
    page.get_by_label("search samples").fill("response 2")
    page.evaluate("window.scrollTo(0, 300)")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 0.9}\n')
    write_report([folder], output)
    page.get_by_text("step 5").first.wait_for(timeout=10_000)
    assert page.evaluate("window.scrollY") == 300
    assert page.get_by_label("search samples").input_value() == "response 2"
