"""What the docs site needs beyond Markdown; mkdocs.yml names this file as a hook.

The pages of docs/ are read on GitHub too. Two things of theirs mean nothing to mkdocs: a link to a file outside of
docs/, and formulas between dollar signs, which GitHub draws with a script from the network. Here they become a link to
the repository, and drawings.
"""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath

logger = logging.getLogger("mkdocs.hooks.docs_site")  # mkdocs counts warnings below "mkdocs"; --strict fails on one

LINK = re.compile(r"\]\((?P<target>\.\./[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
# What pymdownx.arithmatex makes of $formula$ and $$formula$$.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

UNITS = 1000  # of a drawing, per em
LETTERS = {Outline.MOVETO: "M", Outline.LINETO: "L", Outline.CURVE3: "Q", Outline.CURVE4: "C", Outline.CLOSEPOLY: "Z"}
FONT = FontProperties(math_fontfamily="stix", size=UNITS)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page's text."""
    docs = Path(config.docs_dir)
    source = Path(page.file.src_uri)

    def linked(link: re.Match[str]) -> str:
        path = (docs / source.parent / link["target"]).resolve()
        if path.is_relative_to(docs):
            return link[0]
        if not path.exists():
            logger.warning("Doc file '%s' contains a link '%s', but there is no such file", source, link["target"])
        return f"]({in_repository(path, docs.parent, config.repo_url)}{link['anchor'] or ''})"

    return LINK.sub(linked, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with each page's HTML."""
    return FORMULA.sub(lambda found: drawn(html.unescape(found[2]).strip(), block=found[1] == "div"), content)


def in_repository(path: Path, root: Path, url: str) -> str:
    """The address at which the repository's site shows this file or folder."""
    return f"{url.rstrip('/')}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(root).as_posix()}"


def drawn(formula: str, *, block: bool) -> str:
    """A formula of LaTeX as SVG, in the colour of the text around it.

    Raises:
        ValueError: matplotlib does not know a command in it.
    """
    outline = TextPath((0, 0), f"${formula}$", prop=FONT)
    box = outline.get_extents()
    # In SVG y grows downwards.
    parts = (
        LETTERS[code] + " ".join(f"{x - box.x0:.0f},{box.y1 - y:.0f}" for x, y in vertices.reshape(-1, 2))
        for vertices, code in outline.iter_segments(simplify=False, curves=True)
    )
    path = re.sub(r"Z[\d, -]*", "Z", "".join(parts))
    style = f"width:{box.width / UNITS:.3f}em;height:{box.height / UNITS:.3f}em"
    style += "" if block else f";vertical-align:{box.y0 / UNITS:.3f}em"
    drawing = (
        f'<svg class="formula" role="img" aria-label="{html.escape(formula)}" style="{style}"'
        f' viewBox="0 0 {box.width:.0f} {box.height:.0f}"><path d="{path}"/></svg>'
    )
    return f'<div class="formula-block">{drawing}</div>' if block else drawing
