"""`swerl view` in a real Chromium: policy, keys, sorting, live refresh, files from disk, widths."""

from __future__ import annotations

import fcntl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestServer

from swerl.core.events import StepEnded
from swerl.runs.history import EventLog
from swerl.view import server
from swerl.view.site import Site
from tests.integration import _browser as browser
from tests.integration._browser import Tab
from tests.unit.view.test_view import HOSTILE, TOKEN, make_evaluation, make_run

EPISODE = "r/a%20run/e/00001/some_task.1"
PAGES = (
    "index.html", "r/a%20run/index.html", "r/a%20run/s/00001.html",
    f"{EPISODE}/index.html", f"{EPISODE}/t2.html", f"{EPISODE}/vs/a%20run/00001/some_task.0.html",
)  # fmt: skip
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if browser.program() is None:
        pytest.skip(f"needs one of {', '.join(browser.PROGRAMS)}: apt-get install chromium")
    with browser.chromium(tmp_path_factory.mktemp("profile")) as address:
        yield address


@pytest_asyncio.fixture
async def tab(chromium: str) -> AsyncIterator[Tab]:
    async with browser.opened_tab(chromium) as opened:
        yield opened


@pytest_asyncio.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    make_run(tmp_path / "runs", said=HOSTILE)
    async with TestServer(server.application(Site(tmp_path / "runs"), TOKEN)) as http:
        yield f"http://127.0.0.1:{http.port}/{TOKEN}/"


def test_the_test_command_installs_a_browser() -> None:
    bootstrap = (Path(__file__).parents[2] / "bootstrap.py").read_text()
    assert f'"{browser.PROGRAMS[0]}": "chromium",' in bootstrap


async def test_every_page_fits_both_widths_and_breaks_no_policy(tab: Tab, url: str) -> None:
    for width in (1280, 390):
        await tab.size(width)
        for page in PAGES:
            await tab.go(url + page)
            assert await tab.eval(FITS), (page, width)
            assert "owned" not in await tab.eval("document.title")
            assert await tab.eval("document.scripts.length") == 1
            assert await tab.eval("getComputedStyle(document.querySelector('main')).maxWidth")
    assert tab.complaints == []


async def test_no_cell_is_cut_by_the_next(tab: Tab, url: str) -> None:
    for width in (1280, 390):
        await tab.size(width)
        await tab.go(url + PAGES[2])
        # What a long Episode has: thousands of tokens, hundreds of seconds.
        await tab.eval(
            "document.querySelectorAll('.cell small:last-child')"
            ".forEach((e) => e.textContent = '123,456 t · 1,200 s')"
        )
        inner = """[...document.querySelectorAll('.cell a')].map((e) => {
            const last = document.createRange(); last.selectNodeContents(e.lastElementChild);
            return e.getBoundingClientRect().right - last.getBoundingClientRect().right; })"""
        assert min(await tab.eval(inner)) >= 0, width
        await tab.press("?")
        left = "document.querySelector('#help').getBoundingClientRect().left"
        assert await tab.eval(left) >= 8


async def test_two_evaluations_are_opened_compared_and_sorted(
    tab: Tab, url: str, tmp_path: Path
) -> None:
    for name, *solved in (("eval-a", 0, 1, 2), ("eval-b", 2, 1, 2)):
        make_evaluation(tmp_path / "runs", str(name), *map(int, solved))
    for width in (1280, 390):
        await tab.size(width)
        await tab.go(url + "evals.html")
        assert await tab.eval("document.documentElement.scrollWidth") <= width
        await tab.eval("document.querySelector('a[href*=eval-b]').click()")
        await tab.until("document.title.startsWith('eval · eval-b')")
        assert await tab.eval("document.documentElement.scrollWidth") <= width
        await tab.eval("document.querySelector('a[href*=\"/vs/\"]').click()")
        await tab.until("location.pathname.includes('/vs/')")
        assert await tab.eval("document.documentElement.scrollWidth") <= width
    first = "[...document.querySelectorAll('tr[data-row] th')].map((e) => e.textContent)"
    assert (await tab.eval(first))[0] == "org/task-0"
    await tab.eval("[...document.querySelectorAll('th[data-sort]')].at(-2).click()")
    await tab.eval("[...document.querySelectorAll('th[data-sort]')].at(-3).click()")
    await tab.eval("[...document.querySelectorAll('th[data-sort]')].at(-3).click()")
    assert (await tab.eval(first))[0] == "org/task-2"
    assert tab.complaints == []


async def test_every_control_and_chart_has_a_name(tab: Tab, url: str) -> None:
    nameless = """[...document.querySelectorAll('a, button, input, dialog, figure, section, nav')]
        .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
        .length"""
    for page in PAGES:
        await tab.go(url + page)
        assert await tab.eval(nameless) == 0, page


async def test_keys_walk_from_the_runs_to_a_token(tab: Tab, url: str) -> None:
    await tab.go(url + "index.html")
    await tab.press("j", "Enter")
    await tab.until("document.title.startsWith('a run')")
    await tab.press("j", "Enter")
    await tab.until("document.title.startsWith('step 1')")
    await tab.press("[")
    await tab.until("document.title.startsWith('step 0')")
    await tab.press("j", "Enter")
    await tab.until("document.title.startsWith('some_task.0')")
    await tab.press("]")
    await tab.until("document.title.startsWith('some_task.1')")
    await tab.press("j", "j")
    assert await tab.eval("document.activeElement.id") == "turn-2"
    await tab.press("u")
    await tab.until("document.title.startsWith('step 0')")
    await tab.press("?")
    assert await tab.eval("document.querySelector('#help').open")


async def test_a_chosen_theme_stays(tab: Tab, url: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    await tab.size(1280, theme="dark")
    await tab.go(url + "index.html")
    dark = await tab.eval(colour)
    await tab.press("t")
    light = await tab.eval(colour)
    assert light != dark
    await tab.go(url + PAGES[1])
    assert await tab.eval(colour) == light
    await tab.press("t")


async def test_rows_are_sorted_and_filtered(tab: Tab, url: str) -> None:
    await tab.go(url + PAGES[1])
    first = "document.querySelector('tr[data-row]:not([hidden])').children[0].textContent.trim()"
    assert await tab.eval(first) == "1"
    await tab.eval("document.querySelector('th[data-sort]').click()")
    assert await tab.eval(first) == "0"
    await tab.press("/", "n", "o")
    assert await tab.eval("document.querySelectorAll('tr[data-row]:not([hidden])').length") == 0
    await tab.go(url + PAGES[2])
    await tab.eval("document.querySelector('[data-verdict=solved]').click()")
    assert await tab.eval("document.querySelectorAll('td.off').length") == 1


async def test_the_arrow_keys_walk_through_tokens(tab: Tab, url: str) -> None:
    await tab.go(url + PAGES[4])
    await tab.press("ArrowRight")
    assert "position" in await tab.eval("document.querySelector('#token').textContent")


async def test_tokens_on_which_engine_and_trainer_differ_are_walked(tab: Tab, url: str) -> None:
    await tab.go(url + f"{EPISODE}/t1.html")
    await tab.press("d")
    detail = "document.querySelector('#token').textContent"
    first = await tab.eval(detail)
    assert "difference -1.00000" in first and "advantage" in first
    await tab.press("d")  # there is only this one
    assert await tab.eval(detail) == first
    await tab.go(url + f"{EPISODE}/t2.html")
    await tab.press("d")
    assert await tab.eval(detail) == "No framed token is on this page."
    assert tab.complaints == []


async def test_two_chosen_attempts_are_shown_from_where_they_part(tab: Tab, url: str) -> None:
    click = """document.querySelectorAll('.cell a')[{}].dispatchEvent(
        new MouseEvent('click', {{bubbles: true, cancelable: true, shiftKey: true}}))"""
    for number in (0, 1):
        await tab.go(url + PAGES[2])
        await tab.eval(click.format(number))
        assert await tab.eval("document.querySelectorAll('.picked').length") == 1
        await tab.eval(click.format(1 - number))
        await tab.until(f"location.pathname.endsWith('00001/some_task.{1 - number}.html')")
    await tab.go(url + PAGES[2])
    for number in (1, 0):
        await tab.eval(f"document.querySelectorAll('.cell a')[{number}].focus()")
        await tab.press("x")
    await tab.until("location.pathname.endsWith('some_task.1/vs/a%20run/00001/some_task.0.html')")
    assert tab.complaints == []


async def test_a_running_run_refreshes_itself(tab: Tab, url: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a run"
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        await tab.go(url + PAGES[1])
        assert await tab.eval("document.querySelector('.live').textContent") == "live"
        await tab.eval("document.querySelector('details').open = true")
        with EventLog(run / "events.jsonl") as log:
            log(StepEnded(2, {"reward": 0.875}))
        await tab.until("document.querySelector('.facts').textContent.includes('0.875')")
        assert await tab.eval("document.querySelector('details').open")
    assert tab.complaints == []


async def test_static_files_work_from_disk(tab: Tab, url: str, tmp_path: Path) -> None:
    server.write(Site(tmp_path / "runs", is_static=True), tmp_path / "out")
    for page in PAGES[:-1]:  # Files have no comparisons.
        await tab.go((tmp_path / "out").as_uri() + "/" + page)
        assert await tab.eval("getComputedStyle(document.querySelector('main')).maxWidth")
        assert await tab.eval("getComputedStyle(document.body).margin") == "0px"
    await tab.press("?")
    assert await tab.eval("document.querySelector('#help').open")
    assert tab.complaints == []
