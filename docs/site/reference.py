"""The reference: what is public, by module, from its docstrings.

    ```{public} dlsys.nn
    :from: layers sequence
    ```

lists the public names of dlsys.nn that these of its files define, or all of them without `from`.
Docstrings are plain text, as `help` shows them; here their code becomes links, their parameters
bold.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import surface
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

# What pages and docstrings call the modules.
SHORT = {
    "dl": "dlsys",
    "F": "dlsys.functional",
    "ad": "dlsys.autodiff",
    "nn": "dlsys.nn",
    "optim": "dlsys.optim",
    "init": "dlsys.init",
    "train": "dlsys.train",
    "data": "dlsys.data",
    "viz": "dlsys.viz",
    "profile": "dlsys.profile",
    "dl.onnx": "dlsys.onnx",
    "ndarray": "dlsys.ndarray",
    "gpu_op": "dlsys.gpu_op",
}


class Public(SphinxDirective):
    """The entries of a module's public names."""

    required_arguments = 1
    option_spec = {"from": str.split}

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        files = surface.files(module, self.options.get("from", []))
        names = surface.names(module, files)
        lines = ["```{eval-rst}"]
        for name in names:
            lines += self.entry(module, name) + [""]
        text = StringList([*lines, "```"], source=self.get_source_info()[0])
        node = nodes.section(document=self.state.document)
        self.state.nested_parse(text, self.content_offset, node)
        return node.children

    def entry(self, module: str, name: str) -> list[str]:
        value = surface.value(module, name)
        if not isinstance(value, type):
            return [f".. autofunction:: {module}.{name}"]
        kind = "exception" if issubclass(value, BaseException) else "class"
        members = ", ".join(surface.members(value))
        made = [f".. auto{kind}:: {module}.{name}"]
        return made + ([f"   :members: {members}"] if members else [])


class Methods(SphinxDirective):
    """The functions that are methods too, as code, which becomes links."""

    def run(self) -> list[nodes.Node]:
        text = ", ".join(f"`F.{name}`" for name in surface.methods())
        node = nodes.section(document=self.state.document)
        self.state.nested_parse(StringList([text]), self.content_offset, node)
        return node.children


# ---- docstrings as reStructuredText ----


def as_markup(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Rewrites a docstring of plain text in place."""
    parameters = surface.parameters(value)
    text = re.sub(r"^```\n(.*?)^```$", _fenced, "\n".join(lines).strip("\n"), flags=re.S | re.M)
    blocks = re.split(r"\n(?:[ \t]*\n)+", text)
    lines[:] = [line for block in blocks for line in [*_block(block, parameters), ""]]


def _fenced(found: re.Match[str]) -> str:
    """A fenced block as indented text without empty lines."""
    return "\n".join(f"    {line}".rstrip() or "    " for line in found[1].splitlines())


def _block(block: str, parameters: list[str]) -> list[str]:
    """A paragraph, a list, an example, indented code, or names with what they mean."""
    lines = block.split("\n")
    if lines[0].lstrip().startswith(">>>"):
        return lines
    if all(line.startswith("    ") for line in lines):
        return [".. code-block:: python", "", *lines]
    if re.fullmatch(r"[A-Z][a-z]+:", lines[0]):
        items = [re.sub(r"^    ([\w*, ]+):", r"- `\1`:", line) for line in lines[1:]]
        items = [line if line[:1] == "-" else f"  {line.strip()}" for line in items]
        return [lines[0], "", *_text("\n".join(items), [])]
    return _items(_text(block, parameters))


def _items(lines: list[str]) -> list[str]:
    """Three or more described parameters, one after the other, as a list."""
    text = " ".join(line.strip() for line in lines)
    first, *others = re.split(r"(?:^|(?<=[.;]) )(?=\*\*\w[^*]*\*\*:)", text)
    if len(others) < 3:
        return lines
    return [*([first, ""] if first else []), *(f"- {item}" for item in others)]


def _text(text: str, parameters: list[str]) -> list[str]:
    made = re.sub(r"`[^`]+`|[^`]+", lambda found: _inline(found[0], parameters), text)
    return made.split("\n")


def _inline(text: str, parameters: list[str]) -> str:
    if text.startswith("`"):
        return f"`{text}`"
    text = re.sub(r"(?<![\w.])[A-Z]\w*Error\b", r"``\g<0>``", text)
    text = re.sub(r"([\\*|]|_\b|(?<=\w)_(?!\w))", r"\\\1", text)
    if parameters:
        name = "(?:" + "|".join(re.escape(p).replace("_", r"(?:\\)?_") for p in parameters) + ")"
        names = rf"((?:^|(?<=[.;] )|(?<=\n)){name}(?:(?:, | and ){name})*):(?= |\n)"
        text = re.sub(names, lambda found: f"**{found[1]}**:", text)
    return text


def signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, given: str | None, *rest: Any
) -> tuple[str | None, str | None] | None:
    """Nothing for a class that takes nothing, whatever `__new__` of a base would take."""
    return ("()", None) if what == "class" and not surface.parameters(value) and given else None


# ---- links ----


def link_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes links to files beside docs/ links to copies of them; folders stay as text."""
    folder = (Path(app.srcdir) / page).parent

    def linked(found: re.Match[str]) -> str:
        text, target = found.groups()
        path = (folder / target).resolve()
        if path.is_relative_to(app.srcdir) or not path.exists():
            return found[0]
        return f"{{download}}`{text} <{target}>`" if path.is_file() else text

    source[0] = re.sub(r"\[`?([^]`]+)`?\]\(([^)#:]+)(?:#[^)]*)?\)", linked, source[0])


def link_code(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Makes inline code that names something public a link to it."""
    known = dict(app.env.domaindata["py"]["objects"])
    for literal in list(tree.findall(nodes.literal)):
        if isinstance(literal.parent, (nodes.reference, nodes.title)) or literal.children[1:]:
            continue
        text = literal.astext()
        target = None if text in _parameters(literal) else _target(text, _scope(literal), known)
        if target and (known[target].objtype != "module" or "." in text):
            entry = known[target]
            link = make_refnode(
                app.builder, page, entry.docname, entry.node_id, literal.deepcopy(), target
            )
            literal.replace_self(link)


def _parameters(literal: nodes.Node) -> set[str]:
    """The names of the parameters of the entries that code stands in."""
    found: set[str] = set()
    node = literal.parent
    while node is not None:
        if isinstance(node, addnodes.desc):
            heads = node.children[0].findall(addnodes.desc_parameter)
            found |= {head.children[0].astext() for head in heads if head.children}
        node = node.parent
    return found


def _scope(literal: nodes.Node) -> list[str]:
    """The class and module that the code stands in, the innermost first."""
    node, found = literal.parent, []
    while node is not None:
        if isinstance(node, addnodes.desc):
            module, name = (node.children[0].get(key, "") for key in ("module", "fullname"))
            owner = name.rpartition(".")[0]
            found += [f"{module}.{name}", *([f"{module}.{owner}"] if owner else []), module]
        node = node.parent
    return found


def _target(text: str, scopes: list[str], known: dict[str, Any]) -> str | None:
    name = re.match(r"@?([A-Za-z_][\w.]*)(?:\(.*\))?$", text)
    if not name:
        return None
    first, dot, rest = name[1].partition(".")
    full = SHORT.get(first, first) + dot + rest
    for candidate in (
        *(f"{scope}.{name[1]}" for scope in scopes),
        full,
        f"dlsys.{full}",
        f"dlsys.errors.{full}",
    ):
        if candidate in known and candidate not in scopes[:1]:
            return candidate
    return None


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.add_directive("methods", Methods)
    app.connect("autodoc-process-docstring", as_markup)
    app.connect("autodoc-process-signature", signature)
    app.connect("source-read", link_files)
    app.connect("doctree-resolved", link_code)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
