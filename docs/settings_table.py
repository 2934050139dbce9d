"""Sphinx extension: tables of methods and of their settings, read off the registry.

    ```{methods}
    ```

lists all methods;

    ```{settings} fmcsc
    ```

the settings of one, with defaults and what their dataclasses say of them.
"""

from __future__ import annotations

import dataclasses
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from experiments.lib.settings import settings_of
from jaxfedmvc.algorithms import METHODS
from jaxfedmvc.algorithms.reveals import reveals


def row(*cells: str) -> str:
    """Returns a row of a table in Markdown."""
    return "| " + " | ".join(re.sub(r"([|*])", r"\\\1", cell) for cell in cells) + " |"


def settings_table(dataclass: type) -> str:
    """Returns a table of the fields of a dataclass: name, default, meaning."""
    required = {
        field.name
        for field in dataclasses.fields(dataclass)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    lines = [row("setting", "default", "meaning"), row("---", "---", "---")]
    for setting in settings_of(dataclass):
        flag = "" if setting.flag == setting.name else f" (flag: `--{setting.flag}`)"
        default = "required" if setting.name in required else f"`{setting.default!r}`"
        lines.append(row(f"`{setting.name}`{flag}", default, setting.help))
    return "\n".join(lines)


def methods_table() -> str:
    """Returns a table of all methods: name, partition, rounds, paper, what messages tell."""
    head = ("`--algorithm`", "partition", "rounds", "paper", "sends", "which reveals")
    lines = [row(*head), row(*["---"] * len(head))]
    for name, method in sorted(METHODS.items()):
        paper = f"{{cite:t}}`{method.paper}`" if method.paper else ""
        told = reveals(name, method)
        cells = (f"`{name}`", method.topology, str(method.rounds), paper, told.kind, told.text)
        lines.append(row(*cells))
    return "\n".join(lines)


class Settings(SphinxDirective):
    """The settings of one method."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns a table for the configuration and one for the hyper-parameters."""
        name = self.arguments[0]
        if name not in METHODS:
            raise self.error(
                f"settings: no method {name!r}; there are {', '.join(sorted(METHODS))}"
            )
        method = METHODS[name]
        text = ""
        for dataclass, what in (
            (method.config, "static: a change compiles a new program"),
            (method.hyperparams, "traced: a sweep batches them in one program"),
        ):
            if dataclasses.fields(dataclass):
                text += f"`{dataclass.__name__}` ({what}):\n\n{settings_table(dataclass)}\n\n"
        return self.parse_text_to_nodes(text)


class Methods(SphinxDirective):
    """All methods of the registry."""

    def run(self) -> list[nodes.Node]:
        """Returns the table."""
        return self.parse_text_to_nodes(methods_table())


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives."""
    app.add_directive("settings", Settings)
    app.add_directive("methods", Methods)
    return {"parallel_read_safe": True}
