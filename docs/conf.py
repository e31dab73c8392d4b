"""How Sphinx builds the site (`make docs`). Warnings are errors: every link and reference leads somewhere."""

from __future__ import annotations

from typing import Any

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring

import bml
import bml.faults
import bml.topology

project = "bml"
copyright = "the authors of bml"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
copybutton_prompt_text = "$ "  # of a block with commands and what they print, only the commands are copied
copybutton_line_continuation_character = "\\"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "bml"
html_copy_source = False
smartquotes = False

default_role = "py:obj"  # `Result.value` in a docstring is a link where there is something of that name
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

#: Names of Python and of other projects in signatures: links to them would need files from the network.
nitpick_ignore_regex = [("py:.*", r"(collections\.abc|fractions|os|types|networkx|numpy|np|npt|nx)\..*")]

PUBLIC = {
    key: f"{package.__name__}.{name}"
    for package in (bml.faults, bml.topology, bml)
    for name in package.__all__
    for key in (name, f"{getattr(package, name).__module__}.{name}")
    if hasattr(getattr(package, name), "__qualname__")
}
"""A public name, alone or by the module that defines it -> the name that users write, which the site has."""


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: Element) -> Element | None:
    """Find what a reference means that Sphinx does not know.

    Public names are found by where they are defined. Text in backticks of a docstring need be no name.
    """
    if node.get("refdomain") != "py":
        return None
    found: Any = None
    name = PUBLIC.get(node["reftarget"])
    if name is not None:
        domain = env.domains["py"]
        found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, shown)
    return shown if found is None and node["reftype"] == "obj" else found


def sections(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Read the sections `Args:` and `Raises:` of a docstring, where it has any."""
    if {"Args:", "Raises:"} & {*lines}:
        lines[:] = GoogleDocstring(lines, Config(napoleon_use_ivar=True), app, what, name, obj).lines()


def setup(app: Sphinx) -> None:
    """Connect the two; Sphinx calls this."""
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", sections)
