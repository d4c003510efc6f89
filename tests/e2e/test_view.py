"""The page of tools/view.py in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftmega.trainer.trajectories import write
from tools import view

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
HOSTILE = "</pre></script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u2028<b>"
MANY = 2000


def sample(i: int) -> dict[str, Any]:
    """Rewards in no order; number 3 is hostile, number 5 has no reward, number 7 no token."""
    text = HOSTILE if i == 3 else f"answer {i}"
    pieces = [] if i == 7 else [text, " and", " more"]
    values = {"engine_logp": [-1.5, -0.25, -3.0], "trainer_logp": [-1.0, -0.5, -3.0], "gap": [-0.5, 0.25, 0.0],
              "advantage": [1.0, 1.0, 1.0], "entropy": [0.1, 2.0, None]}  # fmt: skip
    return {
        "step": 1 + i // 100, "group": i // 4, "index": i, "prompt": HOSTILE if i == 3 else f"question {i}",
        "response": "".join(pieces), "label": HOSTILE if i == 3 else f"label {i}",
        "reward": None if i == 5 else (i * 7919 % MANY) / MANY, "reward_parts": {"exact_match": 0.0, HOSTILE: 1.0},
        "truncated": False,
        "tokens": {"id": [4, 5, 6][: len(pieces)], "text": pieces} | {k: v[: len(pieces)] for k, v in values.items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    (folder / "trajectories").mkdir()
    write(folder / "trajectories/step_000001.jsonl.gz", map(sample, range(MANY)))
    assert view.main([str(folder)]) == 0
    return f"file://{folder}/trajectories.html"


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, loaded. Whatever it complains of or asks for besides itself fails the test."""
    page = browser.new_page(viewport={"width": 1200, "height": 700})
    said: list[str] = []
    page.on("console", lambda message: said.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: said.append(request.url))
    page.goto(address)
    yield page
    page.close()
    assert said == [address]


def column(page: Any, name: str) -> list[str]:
    place = ["step", "reward", "length", "gap", "prompt", "response"].index(name)
    texts: list[str] = page.eval_on_selector_all("tr.row", f"rows => rows.map(row => row.children[{place}].textContent)")
    return texts


def colours(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(".token", "tokens => tokens.map(t => getComputedStyle(t).backgroundColor)")
    return found


def find(page: Any, text: str) -> None:
    page.fill("#filter", text)


def test_sorting_by_reward_orders_it_both_ways_with_the_unknown_last(page: Any) -> None:
    ordered = [f"question {i}" for i in sorted(set(range(MANY)) - {3, 5}, key=lambda i: i * 7919 % MANY)]
    assert column(page, "prompt")[:3] == ["question 0", "question 1", "question 2"]
    page.get_by_role("button", name="reward").click()
    shown = column(page, "prompt")
    assert len(shown) > 20
    assert shown == ordered[::-1][: len(shown)]
    page.get_by_role("button", name="reward").click()
    assert column(page, "prompt")[:15] == ordered[:15]
    page.keyboard.press("End")
    assert column(page, "reward")[-1] == "–"
    assert page.text_content("#prompt") == "question 5"


def test_a_click_shows_the_sample(page: Any) -> None:
    page.get_by_text("question 9", exact=True).click()
    assert [page.text_content(f"#{part}") for part in ("prompt", "response", "label")] == [
        "question 9", "answer 9 and more", "label 9",
    ]  # fmt: skip
    assert page.get_attribute("tr.row[aria-selected=true]", "data-sample") == "9"
    page.get_by_text("question 7", exact=True).click()
    assert page.text_content("#response") == ""


def test_lines_that_all_prompts_begin_with_are_left_out_of_the_table(browser: Any, tmp_path: Path) -> None:
    prompts = ["system\nuser: one", "system\nuser: two"]
    (tmp_path / "x.html").write_text(view.page([sample(i) | {"prompt": text} for i, text in enumerate(prompts)], title="x"))
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/x.html")
    assert column(page, "prompt") == ["…user: one", "…user: two"]
    assert page.text_content("#prompt") == prompts[0]
    page.close()


def test_colours_follow_what_is_asked_for_and_the_sign(page: Any) -> None:
    gap = colours(page)
    assert len(set(gap)) == 3, "below, above and at zero"
    page.get_by_label("advantage").check()
    advantage = colours(page)
    assert len(set(advantage)) == 1
    assert advantage[0] != gap[0]
    page.get_by_label("entropy").check()
    assert colours(page)[:2] not in (gap[:2], advantage[:2])
    assert colours(page)[2] == "rgba(0, 0, 0, 0)", "it is not known"
    assert "entropy" in page.text_content("#meaning")
    page.keyboard.press("ArrowDown")
    assert page.text_content("#prompt") == "question 1"
    assert page.is_checked("input[value=entropy]")


def test_hovering_and_the_arrow_keys_show_a_tokens_values(page: Any) -> None:
    assert page.is_hidden("#tip")
    page.hover(".token >> nth=1")
    for part in ('" and"', "id 5", "token 2 of 3", "-0.25", "-0.5", "0.25", "2"):
        assert part in page.text_content("#tip")
    page.keyboard.press("ArrowRight")
    assert "token 1 of 3" in page.text_content("#tip")
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_up_and_down_choose_and_a_few_rows_stand_for_thousands(page: Any) -> None:
    assert page.locator("tr.row").count() < 60
    for key, prompt in (("ArrowDown", "question 1"), ("ArrowDown", "question 2"), ("ArrowUp", "question 1"),
                        ("End", f"question {MANY - 1}"), ("ArrowUp", f"question {MANY - 2}")):  # fmt: skip
        page.keyboard.press(key)
        assert page.text_content("#prompt") == prompt
        # Rows are drawn anew when the browser tells of the scrolling, a moment after the key: waited for, looked at in one go.
        page.wait_for_function("""() => {
            const chosen = document.querySelector("tr.row[aria-selected=true]")?.getBoundingClientRect();
            const view = document.querySelector("#scroll").getBoundingClientRect();
            return chosen && view.top < chosen.top && chosen.top < view.bottom - 20;
        }""")
    assert page.locator("tr.row").count() < 60


def test_the_filter_keeps_what_holds_the_text(page: Any) -> None:
    find(page, "LABEL 123")
    expected = [f"question {i}" for i in range(MANY) if "label 123" in f"label {i}"]
    assert column(page, "prompt") == expected
    assert page.text_content("#count") == f"{len(expected)} of {MANY} samples"
    assert page.text_content("#prompt") == "question 123"
    find(page, "no such text")
    assert column(page, "prompt") == []


def test_hostile_text_is_text(page: Any) -> None:
    find(page, "onerror")
    page.keyboard.press("ArrowDown")
    assert column(page, "prompt") == [HOSTILE]
    assert page.text_content("#prompt") == HOSTILE
    assert page.text_content("#label") == HOSTILE
    assert page.text_content("#response") == HOSTILE + " and more"
    assert HOSTILE in page.text_content("#facts")
    page.hover(".token >> nth=0")
    assert "onerror" in page.text_content("#tip")
    assert page.locator("img, pre b, td b").count() == 0
    assert page.title().startswith("Trajectories of ")
    assert page.locator("script").count() == MANY + 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_colour(scheme: str, browser: Any, address: str) -> None:
    """Contrast as WCAG 2 counts it, on the strongest colours there are: at least 4.5."""
    page = browser.new_page(color_scheme=scheme)
    page.goto(address)
    ratios = page.evaluate("""() => {
        const paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const pixel = colours => { colours.forEach(c => { paint.fillStyle = c; paint.fillRect(0, 0, 1, 1); });
            return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3); };
        const linear = x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
        const light = rgb => { const [r, g, b] = rgb.map(x => linear(x / 255));
            return .2126 * r + .7152 * g + .0722 * b; };
        return ["up", "down"].map(kind => {
            const token = document.querySelector(".token"), style = getComputedStyle(token);
            token.className = "token " + kind; token.style.setProperty("--share", 1);
            const under = getComputedStyle(token.parentElement).backgroundColor;
            const [a, b] = [light(pixel([under, style.backgroundColor])), light(pixel([style.color]))].sort((x, y) => y - x);
            return (a + .05) / (b + .05); });
    }""")
    page.close()
    assert min(ratios) >= 4.5, ratios
