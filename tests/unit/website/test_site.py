"""The site of docs/: it builds with every link, reads as GitHub reads the files, and asks nothing of
any network.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
from markdown_it import MarkdownIt

from rftmega.config.tree import options
from website import formulas, layouts_drawn
from website.links import PAGES, of_the_site
from website.lists import for_python_markdown
from website.options_page import options_page
from website.python_api import escaped, python_api_page, section

ROOT = Path(__file__).parents[3]
CHROMIUM = Path("/usr/bin/chromium")
SOURCES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in PAGES)])
COMPARED = ("ul", "ol", "li", "pre", "table", "tr", "h1", "h2", "h3", "h4", "blockquote", "strong")


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of the site, to be broken."""
    for name in ("docs", "website"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "rftmega.schema.json", *(page for page in PAGES if "/" not in page)):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("rftmega", "converters", "LICENSE", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


class Structure(HTMLParser):
    """The beginnings and ends of lists, code, tables and titles, in order."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in COMPARED:
            self.found.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in COMPARED:
            self.found.append(f"/{tag}")


class Fetched(HTMLParser):
    """Addresses that a browser asks for when it shows a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "link"):
            self.found += [given.get(name) or "" for name in ("src", "href")]


def of_github(text: str) -> list[str]:
    return Structure(MarkdownIt("commonmark").enable("table").render(text)).found


def of_the_pages(text: str) -> list[str]:
    extensions = ["tables", "attr_list", "md_in_html", "pymdownx.highlight", "pymdownx.superfences"]
    plain = {"pymdownx.highlight": {"guess_lang": False}}
    shown = markdown.markdown(
        for_python_markdown(text), extensions=extensions, extension_configs=plain
    )
    return Structure(shown).found


def pages(site: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob("*.html")):
        yield str(path.relative_to(site)), path.read_text()


def test_it_builds_and_has_a_page_of_every_document(site: Path) -> None:
    built = {name for name, _ in pages(site)}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= built
    assert {page.replace(".md", ".html") for page in PAGES.values()} | {"options.html"} <= built
    assert {"lightrft_names.html", "rlinf_names.html", "python_api.html"} <= built


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium")
@pytest.mark.parametrize("name", ["index.html", "decisions/traps.html"])
def test_a_page_that_is_opened_as_a_file_can_be_searched(name: str, site: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"file://{site}/{name}")
        page.keyboard.press("/")
        page.keyboard.type("max_staleness")
        first = page.locator(".md-search-result__link").first.get_attribute("href") or ""
        browser.close()
    assert first.startswith(f"file://{site}/asynchronous.html")


def test_the_python_api_has_signatures_fields_and_docstrings() -> None:
    text = python_api_page()
    assert "def train(\n    config: str | Path | Mapping[str, Any] | RunConfig," in text
    assert "Returns its\nresult when it has ended." in text
    assert "class Sampling(NamedTuple):\n    temperature: float = 1.0" in text
    assert "async def run(self, task: Prompt, model: Model)" in text
    assert escaped("a `b_c` d_e *f* <g> `h<i>`") == r"a `b_c` d\_e \*f\* &lt;g&gt; `h<i>`"
    with pytest.raises(LookupError, match="gone"):
        list(section("rftmega.core.types.gone"))


MISTAKES = (
    ("docs/data.md", "[gone](gone.md)", "gone.md, which is not there"),
    ("docs/data.md", "[gone](rewards.md#gone)", "'rewards.md' does not contain an anchor"),
    ("README.md", "[gone](docs/gone.md)", "docs/gone.md, which is not there"),
    ("README.md", "![gone](docs/images/gone.png)", "gone.png, which is not there"),
    (
        "docs/data.md",
        "[gone](options.md#parallel.tenser)",
        "'options.md' does not contain an anchor",
    ),
    ("docs/alone.md", "# A page that no one finds", "not included in the"),
    ("docs/algorithms.md", "```math\n\\wrong{x}\n```", "wrong{x}"),
)


@pytest.mark.ranks
def test_a_planted_mistake_stops_the_build(copy: Path) -> None:
    """Each is a warning, of which one is enough where the build is strict."""
    for file, text, _ in MISTAKES:
        with (copy / file).open("a") as document:
            document.write(f"\n\n{text}\n")
    done = build(copy, copy / "out")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for _, text, told in MISTAKES:
        assert any(told in warning for warning in warnings), (text, done.stderr)


def test_no_page_asks_anything_of_another_host(site: Path) -> None:
    asked = [(name, url) for name, text in pages(site) for url in Fetched(text).found]
    assert [(name, url) for name, url in asked if "//" in url and "://localhost" not in url] == []
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", styles)
    assert "unpkg.com" not in "".join(text for _, text in pages(site))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lists_code_and_tables_are_those_that_github_shows(path: Path) -> None:
    assert of_the_pages(path.read_text()) == of_github(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "Text:\n- a\n  more\n  - b\n    more\n- c\n",
        "1. a\n\n       code\n2. b\n\n   text\n",
        "- a\n\n      code\n\n    text of nothing\n",
        "- a\n\n  | x | y |\n  |---|---|\n  | 1 | 2 |\n",
        "    code\n    - no item\n\ntext\n",
        "```bash\n- no item\n  - none\n```\n\n- an item\n",
        "10. a\n    - b\n      - c\n\ntext\n",
    ],
)
def test_a_list_becomes_the_same_list(text: str) -> None:
    assert of_the_pages(text) == of_github(text)


def test_links_lead_to_pages_and_lose_what_is_no_page() -> None:
    missing: list[str] = []
    text = (
        "[a](docs/data.md#prompts) [`b`](ARCHITECTURE.md) [c](LICENSE) ![d](docs/images/x.png) "
        "`[e](docs/data.md)` [f](https://a.b/c)\n\n```\n[g](docs/data.md)\n```\n"
    )
    (line, _, *code) = of_the_site(text, "README.md", ROOT, missing.append).splitlines()
    assert line == (
        "[a](data.md#prompts) [`b`](architecture.md) c ![d](images/x.png) "
        "`[e](docs/data.md)` [f](https://a.b/c)"
    )
    assert code == ["```", "[g](docs/data.md)", "```"]
    assert missing == ["README.md has a link to docs/images/x.png, which is not there"]
    up = of_the_site("[x](../README.md)", "docs/data.md", ROOT, missing.append)
    assert up == "[x](index.md)"


def test_formulas_are_drawn_in_the_page(site: Path) -> None:
    text = (site / "algorithms.html").read_text()
    written = (ROOT / "docs/algorithms.md").read_text().count("```math\n")
    drawn = re.findall(r'<svg role="img" aria-label="[^"]+" fill="currentColor"[^>]*><path', text)
    assert len(drawn) == written > 10
    with pytest.raises(ValueError, match="wrong"):
        formulas.svg(r"\wrong{x}")


def test_the_page_of_options_has_each_with_its_default_and_meaning(site: Path) -> None:
    text = options_page()
    listed = set(re.findall(r"</a>`([\w.]+)` \|", text)) | set(
        re.findall(r"`([\w.]+): \{type: \w+\}`", text)
    )
    copied = ("critic.parallel.", "critic.optimizer.")  # said once, with the policy's
    unions = {name.removesuffix(".type") for name in options() if name.endswith(".type")}
    plain = {n for n in options() if not n.endswith(".type") and not n.startswith(copied)}
    assert listed == plain | unions | {"base"}
    assert (
        "`parallel.tensor` | `1` | Tensor-parallel size (TP): processes that share each layer"
        in text
    )
    assert "<small>(whole number, at least 1)</small>" in text
    assert 'id="parallel.tensor"' in (site / "options.html").read_text()


def test_the_images_of_layouts_are_what_the_program_draws() -> None:
    for name, image in layouts_drawn.IMAGES.items():
        file = ROOT / f"docs/images/layout_{name}.svg"
        assert file.read_text() == layouts_drawn.svg(image), "python -m website.layouts_drawn"


def test_a_image_says_what_ranks_hold() -> None:
    drawn = layouts_drawn.svg(layouts_drawn.IMAGES["tensor_pipeline_data"])
    boxes = re.findall(r">rank (\d)<.*?>layers ([\d-]+)<.*?>matrices, part (\d)<", drawn, re.DOTALL)
    by_hand = [(r, "0-3" if r < 4 else "4-7", r % 2) for r in range(8)]
    assert [(int(rank), layers, int(part)) for rank, layers, part in boxes] == by_hand
