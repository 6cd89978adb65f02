"""Write an HTML file that needs no other file: the template with data, styles and scripts inlined."""

import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

import jinja2

_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "figures.js", "charts.js", "table.js", "app.js")
_STATIC = ("title", "facts", "remark", "summary", "own")
"""Parts of the payload that the template writes, so that they need no script."""


def page(payload: Mapping[str, Any]) -> str:
    """Return the page that shows `payload`, as `payload.payload` makes it; texts are escaped."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    data = {name: value for name, value in payload.items() if name not in _STATIC}
    return environment.from_string(_asset("page.html.j2")).render(
        {name: payload[name] for name in _STATIC},
        style=_asset("style.css"),
        scripts=[_asset(name) for name in _SCRIPTS],
        data=_embedded(data),
    )


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _embedded(payload: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
