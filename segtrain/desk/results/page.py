"""HTML pages that need no network: templates, with pictures and charts inside."""

import base64
import math
from datetime import timedelta
from functools import cache
from typing import Any

from segtrain import __version__
from segtrain.config.loading import yaml_value
from segtrain.text import printable


def render(template: str, **values: Any) -> str:
    """The page of `templates/NAME`; everything but charts is escaped."""
    return _templates().get_template(template).render(version=__version__, **values)


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("segtrain.desk.results"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Names come from files of strangers.
        finalize=lambda value: printable(value, len(value)) if type(value) is str else value,
    )
    environment.filters |= {
        "percent": percent,
        "yaml": yaml_value,
        "duration": lambda seconds: str(timedelta(seconds=round(seconds))),
        "gib": lambda number: "-" if number is None else f"{number:.2f} GiB",
        "webp": lambda data: "data:image/webp;base64," + base64.b64encode(data).decode(),
        "hex": lambda color: "#" + bytes(color).hex(),
    }
    return environment


def percent(value: float | None) -> str:
    """In percent with one decimal; a dash for NaN and None."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f}"
