"""Sphinx extension: reads docstrings as the plain text that they are.

Docstrings are written for the reader of the source: names in single backticks, equations indented,
and `|x|` or `a * b` as in a text. reStructuredText would take a bar or an asterisk for markup, and
an indented equation for a quotation.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_SECTION = re.compile(r"\s*(Args|Attributes|Raises|Returns|Yields|Example|Examples|Note):\s*$")
_LIST_ITEM = re.compile(r"\s*([-*]|\d+\.)\s")


def prepared(lines: list[str]) -> list[str]:
    """Returns a docstring in reStructuredText: prose escaped, equations and code as literal blocks.

    A block is a literal where it follows an empty line and is indented further than the paragraph
    before it, outside the sections of the Google form.
    """
    found: list[str] = []
    prose: list[str] = []
    margin, in_section, literal = 0, False, False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            in_section = bool(_SECTION.match(line)) or (in_section and indent > 0)
            literal = literal and indent > margin and not in_section
            begins = number > 0 and not lines[number - 1].strip()
            if not (literal or in_section) and (begins or indent < margin):
                if begins and indent > margin and not _LIST_ITEM.match(line):
                    found += [*escaped(prose), " " * margin + "::", ""]
                    prose, literal = [], True
                else:
                    margin = indent
        (found if literal else prose).append(line)
        if not literal and not line.strip():
            found, prose = [*found, *escaped(prose)], []
    return [*found, *escaped(prose)]


def escaped(lines: list[str]) -> list[str]:
    """Returns a paragraph with the characters of markup escaped, but for what is in backticks."""
    parts = re.split(r"(``[^`]+``|`[^`]+`)", "\n".join(lines))
    for place, part in enumerate(parts):
        if place % 2 == 0:
            text = re.sub(r"(?m)([\\|]|(?<!^)(?<!^ )(?<!^  )\*)", r"\\\1", part)
            parts[place] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)
        else:
            code = re.sub(r"\s+", " ", part.strip("`"))
            # A name is a reference if it leads somewhere; a word may follow without a space.
            mark = "`" if re.fullmatch(r"[\w.]+", code) else "``"
            parts[place] = f"{mark}{code}{mark}"
            if re.match(r"\w", parts[place + 1]):
                parts[place] += "\\ "
    return "".join(parts).split("\n")


def process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Prepares a docstring before the sections of the Google form are read."""
    lines[:] = prepared(lines)


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves out the fields of a `NamedTuple` one by one: its docstring has them."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("autodoc-process-docstring", process, priority=100)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
