"""The report in a real browser: Chromium, if it is there (make test-browser)."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_dist.cli.report import main
from grpo_dist.report.page import ReportServer
from scripts.screenshots import take
from tests.report.runs import write_run, write_step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
IMAGES = Path(__file__).parents[2] / "docs" / "images"
ROWS = [
    {"step": step, "critic/score/mean": step / 9, "actor/kl_loss": 2.0, "timing_s/step": 1.0, "timing_s/gen": 0.5}
    for step in range(1, 9)
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-browser")
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium: make test-browser")
    with playwright.sync_playwright() as driver:
        with driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as found:
            yield found


class Shown:
    """A page that is open, and what the browser complained about."""

    def __init__(self, browser: Any, url: str, **how: Any) -> None:
        self.page = browser.new_context(**how).new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready=yes]")

    def responses(self) -> list[str]:
        """Texts, without the label before a branch."""
        return [t.replace("\na branch:\n", "") for t in self.page.locator("#responses .text").all_inner_texts()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run") / "run", ROWS)
    write_step(folder, 1, ["1", "2", "3", "4"], [0.0, 0.0, 0.0, 0.0])
    write_step(folder, 8, ["#### 1", EVIL, "#### 2 needle", "none"], [0.25, 0.0, 1.0, None])
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    assert main([str(run)]) == 0
    return (run / "report.html").as_uri()


def test_it_opens_without_a_complaint_in_light_and_dark_and_on_a_phone(browser: Any, report: str) -> None:
    papers = []
    for scheme, width in (("light", 1400), ("dark", 1400), ("light", 390)):
        shown = Shown(browser, report, color_scheme=scheme, viewport={"width": width, "height": 800}, offline=True)
        assert shown.complaints == []
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
        assert shown.page.locator(".plot svg.main-svg").first.is_visible()
        papers.append(shown.page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert papers[0] == papers[2] != papers[1]


def open_tab(page: Any, name: str) -> None:
    page.click(f"nav >> text={name}")
    page.wait_for_selector(f"#{name.lower()}:not([hidden])")


def test_alarms_curves_and_seconds(browser: Any, report: str) -> None:
    page = Shown(browser, report).page
    assert "health/kl" in page.inner_text("#alarms")
    assert page.locator("#curves h3").all_inner_texts() == ["Reward", "KL", "Sampler against trainer, by depth"]
    open_tab(page, "Time")
    assert page.locator("#time h3").all_inner_texts() == ["Where a step's seconds go"]
    assert page.locator("#time .plot svg.main-svg").first.is_visible()
    assert not page.locator("#curves").is_visible()
    open_tab(page, "Rows")
    assert "never" in page.inner_text("#rows")
    open_tab(page, "Config")
    assert "algorithm.adv_estimator" in page.inner_text("#config")
    traces = page.evaluate("document.getElementById('plot-1').data.map((trace) => trace.name)")
    assert traces == ["to the reference", "alarm"]


def test_a_group_side_by_side_token_by_token(browser: Any, report: str) -> None:
    shown = Shown(browser, f"{report}#rollouts")
    page = shown.page
    assert page.input_value("#step") == "8"
    assert page.locator("#prompt .role").all_inner_texts() == ["USER", "ASSISTANT"]
    assert "weights of versions 7 to 8" in page.locator("#responses article").first.inner_text()
    assert page.input_value("#group") == "step8-prompt0"
    assert "".join(shown.responses()[0].split()) == "####1"
    assert shown.responses()[1] == EVIL
    assert page.locator("#responses .text .note").all_inner_texts() == ["a branch:"]
    assert page.title() != "owned"
    assert page.locator("#responses img, #responses script").count() == 0
    token = page.locator("#responses article").nth(1).locator(".text span").first
    assert "rgba" in token.evaluate("(element) => getComputedStyle(element).backgroundColor")
    assert "advantage" in token.get_attribute("title")
    page.select_option("#colour", "nothing")
    token = page.locator("#responses article").nth(1).locator(".text span").first
    assert token.evaluate("(element) => element.style.background") == ""


def test_sorting_searching_and_other_steps(browser: Any, report: str) -> None:
    shown = Shown(browser, f"{report}#rollouts")
    page = shown.page
    page.select_option("#group", "")
    page.select_option("#sort", "best first")
    assert "needle" in shown.responses()[0]
    assert shown.responses()[-1] == "none", "without a score"
    page.select_option("#sort", "worst first")
    assert shown.responses()[0] == EVIL
    page.fill("#search", "NEEDLE")
    assert len(shown.responses()) == 1
    page.fill("#search", "")
    page.select_option("#step", "1")
    page.wait_for_function("step.step === 1")
    page.select_option("#group", "")
    assert sorted(shown.responses()) == ["1", "2", "3", "4"]
    assert shown.complaints == []


def test_a_live_run(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ROWS[:1])
    with ReportServer([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            shown = Shown(browser, server.url)
            page = shown.page
            assert not page.locator("nav >> text=Rollouts").is_visible()
            write_run(folder, ROWS)
            write_step(folder, 2, ["1", "2"], [1.0, 0.0])
            page.evaluate("refresh()")
            open_tab(page, "Rollouts")
            assert page.locator("#rollouts").is_visible()
            assert page.evaluate("document.getElementById('plot-0').data[0].x.length") == 8
            assert shown.complaints == []
        finally:
            server.shutdown()
            thread.join()


def test_ten_thousand_responses(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ROWS)
    for step in range(1, 9):
        write_step(folder, step, ["9+6=15 3+3+1=7 7+4=11 #### 1175 " * 5] * 1250, [float(i % 2) for i in range(1250)])
    assert main([str(folder)]) == 0
    shown = Shown(browser, f"{(folder / 'report.html').as_uri()}#rollouts")
    shown.page.select_option("#group", "")
    assert len(shown.responses()) == 60
    assert "of 1250" in shown.page.inner_text("#found")
    assert shown.complaints == []


def test_the_pictures_of_the_docs(browser: Any, run: Path, tmp_path: Path) -> None:
    files = take(browser, run, tmp_path)
    assert [file.name for file in files] == ["report_curves.png", "report_rollouts.png"]
    assert files[0].read_bytes() != files[1].read_bytes()
    assert all((IMAGES / file.name).is_file() for file in files)
