"""A hook of mkdocs: a line `{{ help COMMAND }}` becomes what `pydflash COMMAND --help` prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

_PLACE = re.compile(r"^\{\{ help(.*?) \}\}$", re.MULTILINE)


def help_of(command: str) -> str:
    """The help text of a command ("train fit"); of pydflash itself where it is empty."""
    from pydflash.cli import main

    os.environ.update(COLUMNS="100", NO_COLOR="1")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return shown.getvalue()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return _PLACE.sub(lambda found: f"```text\n{help_of(found[1])}```", markdown)
