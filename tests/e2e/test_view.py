"""The page of tools/view.py in a real browser."""

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rftmega.monitoring.observers.trajectories import write
from rftmega.tools import view

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
HOSTILE = "</pre></script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\u2028<b>"
MANY = 400


def sample(i: int) -> dict[str, Any]:
    """Rewards in no order; number 3 is hostile, number 5 has no reward, number 7 no token."""
    text = HOSTILE if i == 3 else f"answer {i}"
    pieces = [] if i == 7 else [text, " and", " more"]
    values = {"engine_logp": [-1.5, -0.25, -3.0], "trainer_logp": [-1.0, -0.5, -3.0], "gap": [-0.5, 0.25, 0.0],
              "advantage": [1.0, 1.0, 1.0], "entropy": [0.1, 2.0, None], "chosen": [True, True, i != 9]}  # fmt: skip
    return {
        "step": 1 + i // 100, "group": i % 100 // 4, "index": i, "prompt": HOSTILE if i == 3 else f"question {i}",
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
    texts: list[str] = page.eval_on_selector_all(
        "tr.row", f"rows => rows.map(row => row.children[{place}].textContent)"
    )
    return texts


def colours(page: Any) -> list[str]:
    found: list[str] = page.eval_on_selector_all(
        ".token", "tokens => tokens.map(t => getComputedStyle(t).backgroundColor)"
    )
    return found


def find(page: Any, text: str) -> None:
    page.fill("#filter", text)


def test_sorting_by_reward_orders_it_both_ways_with_the_unknown_last(page: Any) -> None:
    ordered = [
        f"question {i}" for i in sorted(set(range(MANY)) - {3, 5}, key=lambda i: i * 7919 % MANY)
    ]
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


def test_lines_that_all_prompts_begin_with_are_left_out_of_the_table(
    browser: Any, tmp_path: Path
) -> None:
    prompts = ["system\nuser: one", "system\nuser: two"]
    (tmp_path / "x.html").write_text(
        view.page([sample(i) | {"prompt": text} for i, text in enumerate(prompts)], title="x")
    )
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/x.html")
    assert column(page, "prompt") == ["…user: one", "…user: two"]
    assert page.text_content("#prompt") == prompts[0]
    page.close()


def test_images_stand_below_the_prompt_and_nothing_else_is_loaded(
    browser: Any, tmp_path: Path
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 20), "red").save(file, format="JPEG")
    drawn = {"digest": "a", "path": HOSTILE, "grid": [1, 2, 2]}
    first = drawn | {"thumbnail": base64.b64encode(file.getvalue()).decode()}
    gone = {"digest": "b", "path": "gone.png", "grid": [1, 4, 4], "thumbnail": None}
    samples = [
        sample(0) | {"images": [first, gone]},
        sample(1) | {"images": [drawn]},
        sample(2),
    ]
    (tmp_path / "x.html").write_text(view.page(list(map(view.checked, samples)), title="x"))
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/x.html")
    widths = "images => [...images.querySelectorAll('img')].map(p => p.naturalWidth)"
    assert page.eval_on_selector("#images", widths) == [40]
    assert page.text_content("#images") == "gone.png, patches [1, 4, 4]"
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.getElementById('prompt').textContent === 'question 1'")
    assert page.eval_on_selector("#images", widths) == [40]
    assert HOSTILE in page.get_attribute("#images img", "title")
    page.keyboard.press("ArrowDown")
    page.wait_for_function("document.getElementById('prompt').textContent === 'question 2'")
    assert page.eval_on_selector("#images", widths) == []
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


def test_what_the_environment_said_looks_otherwise_and_says_so(page: Any) -> None:
    page.fill("#filter", "answer 9 and more")
    page.click("tr.row >> nth=0")
    classes = [page.locator(".token").nth(n).get_attribute("class") for n in range(3)]
    assert ["given" in each.split() for each in classes] == [False, False, True]
    page.hover(".token >> nth=2")
    assert "given by the environment, not learnt" in page.text_content("#tip")
    page.hover(".token >> nth=0")
    assert "given by the environment" not in page.text_content("#tip")


def talk(i: int, **more: Any) -> dict[str, Any]:
    """A sample of three turns, and tokens of the template between them."""
    pieces = ["I add.", "<end>", "<tool>", "4", HOSTILE, "</tool>", "Four.", "<end>"]
    chosen = [True, True, False, False, False, False, True, True]
    numbers: list[Any] = [0.5 if each else None for each in chosen]
    lists = dict.fromkeys(("engine_logp", "trainer_logp", "gap", "advantage", "entropy"), numbers)
    turns = [
        {"role": "assistant", "name": "", "start": 0, "stop": 2, "reward": 0.25},
        {"role": "tool", "name": HOSTILE, "start": 3, "stop": 5, "reward": 0.0},
        {"role": "assistant", "name": "", "start": 6, "stop": 8, "reward": -0.5},
    ]
    tokens = {"id": list(range(8)), "text": pieces, "chosen": chosen} | lists
    told = {"turns": turns, "measures": {"turns": 2.0, HOSTILE: 1.5}, "rollout": i}
    return sample(i) | {"tokens": tokens, "response": "".join(pieces)} | told | more


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """Opens a page of samples. Whatever it complains of or asks for besides itself fails the test."""
    said: list[str] = []
    pages: list[Any] = []

    def opened(*samples: dict[str, Any], width: int = 1200) -> Any:
        path = tmp_path / f"{len(pages)}.html"
        path.write_text(view.page(list(map(view.checked, samples)), title="x"))
        page = browser.new_page(viewport={"width": width, "height": 800})
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(f"{error}"))
        page.on("request", lambda request: said.append(request.url))
        page.goto(f"file://{path}")
        assert said.pop(0) == f"file://{path}"
        return page

    yield opened
    for page in pages:
        page.close()
    assert said == []


def texts(page: Any, selector: str) -> list[str]:
    return list(page.locator(selector).all_text_contents())


def test_a_conversation_is_a_block_a_turn_with_who_spoke_and_its_reward(open_page: Any) -> None:
    page = open_page(talk(0), sample(1))
    assert texts(page, "#response > .turn > .who") == [
        "assistantreward 0.25",
        f"tool{HOSTILE}not learnt",
        "assistantreward -0.5",
    ]
    assert texts(page, "#response > .turn > .who + div") == [
        "I add.<end>",
        f"4{HOSTILE}",
        "Four.<end>",
    ]
    assert texts(page, "#response > .between") == ["<tool>", "</tool>"]
    order = "blocks => blocks.map(block => block.className)"
    assert page.eval_on_selector_all("#response > div", order) == [
        *("turn learnt", "between", "turn context", "between", "turn learnt"),
    ]
    assert page.is_visible("#conversation")
    assert page.locator("#response img, #measures img, #response script").count() == 0
    page.keyboard.press("ArrowDown")
    assert page.text_content("#response") == "answer 1 and more"
    assert page.locator(".turn").count() == 0
    assert page.is_hidden("#conversation")
    assert page.text_content("#measures") == ""


def test_only_what_was_trained_is_coloured_and_the_template_is_pale(open_page: Any) -> None:
    page = open_page(talk(0))
    clear = "rgba(0, 0, 0, 0)"
    trained = [True, True, False, False, False, False, True, True]
    for measure in ("gap", "advantage", "entropy"):
        page.check(f"input[value={measure}]")
        assert [each != clear for each in colours(page)] == trained
    pale = "blocks => blocks.map(block => Number(getComputedStyle(block).opacity))"
    assert page.eval_on_selector_all("#response > .turn", pale) == [1, 1, 1]
    assert max(page.eval_on_selector_all("#response > .between", pale)) < 0.8
    lines = "blocks => blocks.map(block => getComputedStyle(block).borderLeftStyle)"
    assert page.eval_on_selector_all("#response > .turn", lines) == ["solid", "dashed", "solid"]


def test_hovering_and_the_arrow_keys_reach_every_token_of_a_conversation(open_page: Any) -> None:
    page = open_page(talk(0))
    page.locator("#scroll").focus()
    for number, text in enumerate(["I add.", "<end>", "<tool>", "4"], start=1):
        page.keyboard.press("ArrowRight")
        assert f"token {number} of 8" in page.text_content("#tip")
        assert page.text_content(".token.at") == text
    assert "given by the environment" in page.text_content("#tip")
    page.hover(".token >> nth=6")
    assert '"Four."' in page.text_content("#tip")


def test_turns_without_rewards_show_none_and_one_that_says_nothing_is_there(open_page: Any) -> None:
    turns = [
        {**turn, "reward": 0.0, "stop": turn["start"] if turn["role"] == "tool" else turn["stop"]}
        for turn in talk(0)["turns"]
    ]
    page = open_page(talk(0, turns=turns))
    assert texts(page, "#response .who") == ["assistant", f"tool{HOSTILE}not learnt", "assistant"]
    assert texts(page, "#response > .turn > .who + div")[1] == ""
    assert texts(page, "#response > .between") == ["<tool>", f"4{HOSTILE}</tool>"]
    assert page.locator(".token").count() == 8


def test_trajectories_of_a_rollout_lead_to_each_other_and_to_no_other(open_page: Any) -> None:
    rows = [talk(8, rollout=7)]
    rows += [talk(9, rollout=8, trajectory=n, trajectories=3, prompt=f"part {n}") for n in range(3)]
    rows += [talk(9, rollout=9, trajectory=n, trajectories=2) for n in range(2)]
    page = open_page(*rows)
    assert "trajectory" not in page.text_content("#facts")
    assert [text[:3] for text in column(page, "response")] == [
        "I a",
        "1/3",
        "2/3",
        "3/3",
        "1/2",
        "2/2",
    ]
    page.get_by_text("part 1", exact=True).click()
    assert "trajectory 1 2 3 of 3" in page.text_content("#facts")
    current = "buttons => buttons.map(button => button.getAttribute('aria-current'))"
    buttons = "#facts button[aria-label^=trajectory]"
    assert page.eval_on_selector_all(buttons, current) == ["false", "true", "false"]
    page.get_by_role("button", name="trajectory 3 of 3").click()
    assert page.text_content("#prompt") == "part 2"
    assert page.get_attribute("tr.row[aria-selected=true]", "data-sample") == "3"
    page.fill("#filter", "part 2")
    page.get_by_role("button", name="trajectory 1 of 3").click()
    assert page.text_content("#prompt") == "part 0", "also where the filter leaves it out"


def test_what_the_environment_counted_stands_with_the_facts(open_page: Any) -> None:
    page = open_page(talk(0))
    said = page.text_content("#measures")
    assert said == f"counted by the environment:turns 2{HOSTILE} 1.5"
    find(page, "no such text")
    assert page.text_content("#measures") == ""


@pytest.mark.parametrize("width", [pytest.param(1200, marks=pytest.mark.ranks), 320])
def test_a_conversation_fits_the_screen(width: int, open_page: Any) -> None:
    long = [{**turn, "name": "a_long_name" * 20} for turn in talk(0)["turns"]]
    page = open_page(talk(0, turns=long, trajectory=0, trajectories=1), width=width)
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE) == []


def test_up_and_down_choose_and_a_few_rows_stand_for_thousands(page: Any) -> None:
    assert page.locator("tr.row").count() < 60
    for key, prompt in (("ArrowDown", "question 1"), ("ArrowDown", "question 2"), ("ArrowUp", "question 1"),
                        ("End", f"question {MANY - 1}"), ("ArrowUp", f"question {MANY - 2}")):  # fmt: skip
        page.keyboard.press(key)
        assert page.text_content("#prompt") == prompt
        # Rows are drawn anew when the browser tells of the scrolling, a moment after the key:
        # waited for, looked at in one go.
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


def test_a_filter_that_nothing_passes_says_so_and_shows_no_sample(page: Any) -> None:
    assert page.is_hidden("#none")
    page.hover(".token >> nth=1")
    page.fill("#low", "0.2")
    find(page, "no such text")
    assert column(page, "prompt") == []
    assert page.is_visible("#none")
    assert (
        page.text_content("#reason") == "No sample matches text “no such text”, reward from “0.2”."
    )
    assert page.is_hidden("#sample")
    assert page.is_hidden("#tip")
    assert [page.text_content(f"#{part}") for part in ("facts", "prompt", "response", "label")] == [
        ""
    ] * 4
    for key in ("ArrowDown", "Escape", "ArrowRight", "End", "]"):
        page.keyboard.press(key)
    assert page.is_hidden("#sample")
    page.get_by_role("button", name="show all").click()
    assert page.text_content("#count") == f"{MANY} of {MANY} samples"
    assert page.text_content("#prompt") == "question 0"
    assert page.is_hidden("#none")
    assert page.is_visible("#sample")


def test_rewards_are_filtered_from_and_to_with_both_ends_and_without_the_unknown(page: Any) -> None:
    rewards = {i: sample(i)["reward"] for i in range(MANY)}
    assert (
        page.get_attribute("#low", "placeholder"),
        page.get_attribute("#high", "placeholder"),
    ) == ("0", "0.998")
    for low, high in (("0.25", "0.255"), ("", "0.01"), ("0.99", "")):
        page.fill("#low", low)
        page.fill("#high", high)
        inside = [
            i
            for i, reward in rewards.items()
            if reward is not None and float(low or 0) <= reward <= float(high or 1)
        ]
        assert 2 < len(inside) < 15, "all are in sight"
        assert column(page, "prompt") == [sample(i)["prompt"] for i in inside]
    page.fill("#low", "-1")
    assert page.text_content("#count") == f"{MANY - 1} of {MANY} samples"
    page.fill("#high", "0,5")
    assert page.text_content("#reason") == "“0,5” is no number."
    assert page.get_attribute("#high", "aria-invalid") == "true"


def test_groups_are_jumped_between_and_a_click_shows_the_answers_to_one_prompt(page: Any) -> None:
    def chosen() -> str:
        return str(page.text_content("#prompt"))

    page.get_by_role("button", name="next group").click()
    assert chosen() == "question 4"
    page.keyboard.press("]")
    assert chosen() == "question 8"
    page.get_by_role("button", name="previous group").click()
    assert chosen() == "question 4"
    page.keyboard.press("ArrowDown")
    page.get_by_role("button", name="1/1", exact=True).click()
    assert column(page, "prompt") == [f"question {i}" for i in (4, 5, 6, 7)]
    assert chosen() == "question 5"
    page.keyboard.press("]")
    assert (page.input_value("#group"), chosen()) == ("1/2", "question 8")
    assert column(page, "prompt") == [f"question {i}" for i in (8, 9, 10, 11)]
    page.fill("#group", "3/10")
    assert column(page, "prompt") == [f"question {i}" for i in (240, 241, 242, 243)]
    page.fill("#group", "10")
    assert page.text_content("#count") == f"{MANY // 25} of {MANY} samples", "of every step"
    assert column(page, "prompt")[:5] == [f"question {i}" for i in (40, 41, 42, 43, 140)]
    page.fill("#group", "first")
    assert page.text_content("#reason") == "“first” is no group: give a number, or step/number."
    page.fill("#group", "")
    page.fill("#low", "0.99")
    page.keyboard.press("Escape")
    seen = column(page, "prompt")
    assert chosen() == seen[0]
    page.keyboard.press("]")
    assert chosen() == seen[1], "groups without a sample in the list are passed over"


def inked(browser: Any, image: bytes) -> tuple[list[int], list[float]]:
    """The size of a PNG and, of its upper and its lower half, the share of pixels that have not the
    half's commonest colour.
    """
    page = browser.new_page()
    size, shares = page.evaluate(
        """async data => {
        const image = new Image(), paint = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        image.src = "data:image/png;base64," + data;
        await image.decode();
        const [width, height] = [paint.canvas.width, paint.canvas.height] = [image.width, image.height];
        paint.drawImage(image, 0, 0);
        return [[width, height], [0, height / 2].map(top => {
            const counts = new Map();
            for (const pixel of new Uint32Array(paint.getImageData(0, top, width, height / 2).data.buffer))
                counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
            return 1 - Math.max(...counts.values()) / (width * height / 2); })];
    }""",
        base64.b64encode(image).decode(),
    )
    page.close()
    return size, shares


# Of every cell in sight: its text, and how many of its characters are seen: all, or those before
# the place of an ellipsis.
CELLS = """() => {
    const view = document.querySelector("#scroll").getBoundingClientRect();
    return [...document.querySelectorAll("tr.row td")].filter(cell => {
        const box = cell.getBoundingClientRect();
        return box.width && box.top < view.bottom && box.bottom > view.top;
    }).map(cell => {
        const text = cell.firstChild ?? new Text();
        const box = cell.getBoundingClientRect(), row = cell.parentElement.getBoundingClientRect();
        const inside = box.top >= row.top && box.bottom <= row.bottom && box.right <= view.right;
        if (inside && cell.scrollWidth <= cell.clientWidth) return [text.data, text.length];
        let seen = 0;
        for (let i = 0; inside && i < text.length; i++) {
            const range = document.createRange();
            range.setStart(text, i), range.setEnd(text, i + 1);
            if (range.getBoundingClientRect().right > box.right - parseFloat(getComputedStyle(cell).paddingRight) - 14) break;
            seen++;
        }
        return [text.data, seen];
    });
}"""
OUTSIDE = """() => [...document.querySelectorAll("body *")].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width && box.height && (box.right > innerWidth + .5 || box.left < -.5);
}).map(element => element.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize(
    ("width", "height"),
    [
        pytest.param(1400, 900, marks=pytest.mark.ranks),
        (1001, 800),
        pytest.param(800, 900, marks=pytest.mark.ranks),
        (390, 844),
        (320, 568),
    ],
)
def test_the_page_is_readable_on_a_desk_and_on_a_telephone(
    width: int, height: int, browser: Any, tmp_path: Path
) -> None:
    long = {
        "prompt": "What is the sum of these numbers? " * 20,
        "response": "word" * 300,
        "step": 12345,
        "reward": -0.1234567,
    }
    samples = [sample(i) for i in range(40)] + [sample(40) | long]
    (tmp_path / "x.html").write_text(
        view.page(samples, title="Trajectories of /" + "a/long/path" * 20)
    )
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(f"file://{tmp_path}/x.html")
    for moment, key in (("first", "Home"), ("last", "End")):
        page.keyboard.press(key)
        page.wait_for_function("() => document.querySelector('tr.row[aria-selected=true]')")
        image = page.screenshot(path=tmp_path / f"{width}_{moment}.png")
        size, shares = inked(browser, image)
        assert size == [width, height]
        assert min(shares) > 0.004, "half of the image is blank"
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        assert page.evaluate(OUTSIDE) == []
        cells = page.evaluate(CELLS)
        assert len(cells) >= 12
        assert [(text, seen) for text, seen in cells if seen < min(8, len(text))] == []
        list_, detail = (page.locator(part).bounding_box() for part in ("#scroll", "#detail"))
        assert (detail["y"] >= list_["y"] + list_["height"]) == (width <= 1000), (
            "beside each other where there is room"
        )
    page.locator("tr.row", has_text="question 39").click()
    assert page.text_content("#prompt") == "question 39"
    assert page.locator("#detail").bounding_box()["y"] < height / 2, (
        "a chosen sample is in sight beside or below the list"
    )
    find(page, "no such text")
    page.screenshot(path=tmp_path / f"{width}_none.png")
    assert page.is_visible("#none")
    assert page.evaluate(OUTSIDE) == []
    page.close()


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


SYSTEM = "You are a careful assistant. " * 40  # about 300 tokens
CHATS = [
    "How many legs has a spider?",
    "How many legs have two ants?",
    "What is 3+4?",
    "Name a prime.",
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run of chat prompts on one line, which share a long system prompt, with its metrics."""
    folder = tmp_path_factory.mktemp("chats")
    (folder / "trajectories").mkdir()
    texts = [f"<|system|>{SYSTEM}<|user|>{chat}<|assistant|>" for chat in CHATS]
    said = {0: "8", 1: None, 2: "<think>x</think>7"}
    rows = [
        sample(i) | {"prompt": text, "response": "<think>x</think>7"} | ({"graded": said[i]} if i in said else {})
        for i, text in enumerate(texts)
    ]  # fmt: skip
    for row in rows:
        row["tokens"]["gap"] = [1.23e-5, -4.0e-6, 0.0]
    write(folder / "trajectories/step_000001.jsonl.gz", iter(rows))
    steps = [
        {"step": n, "time": 1.0, "reward": n / 10, "loss": None, "eval_near": 0.5} for n in range(5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert view.main([str(folder)]) == 0
    return f"file://{folder}/trajectories.html"


@pytest.fixture(
    params=[
        pytest.param((1400, 900), id="desk", marks=pytest.mark.ranks),
        pytest.param((390, 844), id="telephone"),
    ]
)
def chat(browser: Any, chats: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(chats)
    yield page
    page.close()


def test_gaps_are_written_with_their_power_of_ten(chat: Any) -> None:
    assert column(chat, "gap")[0] == "5.4e-6"
    assert "5.4e-6, 1.2e-5" in chat.text_content("#facts")


def test_of_prompts_that_begin_alike_the_part_that_differs_is_shown(chat: Any) -> None:
    shown = column(chat, "prompt")
    assert [text.split("<|assistant|>")[0].split("<|user|>")[-1] for text in shown] == CHATS
    assert all(len(text) < 80 and text.startswith("…") for text in shown)
    pale, rest = chat.eval_on_selector_all(
        "#prompt span", "all => all.map(each => each.textContent)"
    )
    assert pale.startswith("<|system|>You are") and CHATS[0] in rest
    assert chat.evaluate(
        "() => { const own = document.querySelector('#prompt'), rest = own.lastChild.getBoundingClientRect(),"
        " box = own.getBoundingClientRect(); return rest.top >= box.top && rest.top < box.bottom }"
    ), "the question is seen without scrolling the prompt"
    assert chat.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert chat.evaluate("() => document.querySelector('#prompt').offsetHeight <= 240")


def test_what_was_graded_is_shown(chat: Any) -> None:
    seen = []
    for number in range(4):
        chat.click(f"tr.row[data-sample='{number}']")
        seen.append(chat.text_content("#graded") if chat.is_visible("#graded") else "hidden")
    assert seen == ["8", "nothing: the reasoning is not finished", "the whole response", "hidden"]


def test_the_page_has_the_curves_of_the_run(chat: Any, page: Any) -> None:
    assert chat.is_visible("#curves")
    said = chat.eval_on_selector_all(
        "#curves figcaption", "all => all.map(each => each.textContent)"
    )
    assert said == ["eval_near 0.5 → 0.5", "reward 0 → 0.4"]
    points = chat.get_attribute("#curves figure:last-child polyline", "points").split()
    places = [tuple(map(float, point.split(","))) for point in points]
    assert [across for across, _ in places] == pytest.approx([2, 26, 50, 74, 98])
    assert [down for _, down in places] == pytest.approx([37, 28.5, 20, 11.5, 3])
    assert not page.is_visible("#run"), "a folder without metrics has none"


def test_a_choice_shows_the_completions_of_evaluations_instead(
    browser: Any, tmp_path: Path
) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "evaluations").mkdir()
    write(tmp_path / "trajectories/step_000001.jsonl.gz", map(sample, range(4)))
    held_out = {
        "step": 5, "set": "easy", "adapter": "", "index": 4, "sample": 0, "prompt": "1+1=", "label": "2",
        "response": "<b>3", "tokens": [7, 9], "truncated": False, "scores": {"math": 0, "reward": 0},
    }  # fmt: skip
    write(tmp_path / "evaluations/step_000005.jsonl.gz", [held_out])
    assert view.main([str(tmp_path)]) == 0
    page = browser.new_page()
    page.goto(f"file://{tmp_path}/trajectories.html")
    assert page.text_content("#count") == "4 of 4 samples"
    page.check("input[name=kind][value=evaluation]")
    assert page.text_content("#count") == "1 of 1 samples"
    assert page.text_content("#response") == "<b>3"
    assert "easy" in page.text_content("#facts")
    page.close()
