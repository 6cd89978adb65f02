"""One HTML file that needs nothing else: the template with data, styles and scripts inlined.

Does not decide what is shown (`payload` does) or write files.
"""

import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

import jinja2

_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "figures.js", "charts.js", "table.js", "app.js")


def page(payload: Mapping[str, Any], index: str = "") -> str:
    """Return the page that shows `payload`, as `payload.payload` makes it; index: the page that lists all of them."""
    return rendered(
        "page.html.j2",
        index=index,
        title=payload["title"],
        facts=payload["facts"],
        remark=payload["remark"],
        scripts=[_asset(name) for name in _SCRIPTS],
        own=payload["own"],
        data=_embedded({name: value for name, value in payload.items() if name != "own"}),
    )


def index_page(contents: Mapping[str, Any]) -> str:
    """Return the page that lists family pages, as `payload.index` makes it; it has no scripts."""
    return rendered("index.html.j2", **contents)


def rendered(template: str, **values: Any) -> str:
    """Return a page of a template of this package, texts escaped; templates that hold `style` get the style of all pages."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_asset(template)).render(style=_asset("style.css"), **values)


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _embedded(payload: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
