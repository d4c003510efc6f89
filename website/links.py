"""Rewrites Markdown links to pages of the site.

On GitHub they point to files of the checkout. A link to a file that is not a page is replaced by
its text.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

PAGES = {  # files outside docs/ that are pages, too
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "examples/smollm/README.md": "smollm.md",
    "examples/gsm8k/README.md": "gsm8k.md",
    "examples/dapo_math/README.md": "dapo_math.md",
    "examples/moe_30b/README.md": "moe_30b.md",
    "examples/code_agent/README.md": "code_agent.md",
}
GENERATED = (
    "docs/options.md",
    "docs/fsdp_architectures.md",
    "docs/python_api.md",
    "docs/lightrft_names.md",
    "docs/rlinf_names.md",
)
FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<code>`[^`]*`)|(!?)\[((?:`[^`]*`|[^\[\]`])*)\]\(([^)\s]+)\)")


def of_the_site(text: str, source: str, root: Path, missing: Callable[[str], None]) -> str:
    """Returns the text of `source`, a file below `root`, with links of the site.

    Calls `missing` for every link to a file that does not exist. Code is left unchanged.
    """

    def link(found: re.Match[str]) -> str:
        code, image, label, target = found.groups()
        if code or "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if file not in GENERATED and not (root / file).exists():
            missing(f"{source} has a link to {target}, which is not there")
        page = page_of(file)
        if page is None:
            return label
        here = posixpath.dirname(page_of(source) or "")
        return f"{image}[{label}]({posixpath.relpath(page, here or '.')}{'#' if anchor else ''}{anchor})"

    found, end = [], 0
    for block in FENCED.finditer(text):
        found += [LINK.sub(link, text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*found, LINK.sub(link, text[end:])])


def page_of(file: str) -> str | None:
    """Returns the page or image of the site for a file of the checkout; None if there is none."""
    return file.removeprefix("docs/") if file.startswith("docs/") else PAGES.get(file)
