"""The directive `api`: signatures and docstrings of public names, read off the source, so that nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"^(Args|Attributes|Yields|Returns|Raises):$")
FIELDS = {"Args": "param", "Attributes": "ivar", "Yields": "returns", "Returns": "returns", "Raises": "raises"}
RECORDS = re.compile(r"dataclass|NamedTuple")
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@cache
def source(module: str) -> tuple[str, ast.Module]:
    """A module's text and tree."""
    text = path_of(module).read_text()
    return text, ast.parse(text)


def path_of(module: str) -> Path:
    """A module's file."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def definition(module: str, name: str) -> tuple[str, Definition]:
    """The module that defines a name and the definition, the last one if it has overloads; imports are followed."""
    tree = source(module)[1]
    for node in reversed(tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            names = getattr(target, "elts", [target])  # of an unpacking
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in (getattr(part, "id", "") for part in names):
                return module, node
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and name in (alias.name for alias in imported.names):
            return definition(str(imported.module), name)
    raise LookupError(f"{module} has no {name}")


class Constants(ast.NodeTransformer):
    """Puts the value of a module's constant in the place of its name."""

    def __init__(self, module: str) -> None:
        self.module = module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id.isupper():
            value = definition(self.module, node.id)[1]
            if isinstance(value, ast.Assign) and isinstance(value.value, ast.Constant):
                return value.value
        return node


def signature(node: ast.FunctionDef, module: str, bound: bool) -> str:
    """Arguments and result as they are written; without `self`."""
    arguments = deepcopy(node.args)
    if bound:
        arguments.args = arguments.args[1:]
    arguments.defaults = [Constants(module).visit(value) for value in arguments.defaults]
    arguments.kw_defaults = [value and Constants(module).visit(value) for value in arguments.kw_defaults]
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"({ast.unparse(arguments)}){result}"


def documented(node: Definition) -> Iterator[str]:
    """A docstring as Markdown, its sections as lists of fields."""
    text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
    field = ""
    for line in (text or "").splitlines():
        line = re.sub(r"<(?=[\w/])", r"\\<", line) if "`" not in line else line
        if section := SECTION.match(line):
            field = FIELDS[section[1]]
            continue
        begins = re.match(r"    (?=\S)(?:([*\w.]+):\s)?(.*)", line) if field else None
        if begins and (begins[1] and field != "returns"):
            yield f":{field} {begins[1].strip('*')}: {begins[2]}"
        elif begins and field == "returns":
            yield f":{field}: {line.strip()}"
            field = "more"
        else:
            yield line
    yield ""


def block(kind: str, head: str, options: list[str], body: Iterator[str] | list[str], fence: int) -> Iterator[str]:
    """A directive of Sphinx's Python domain."""
    yield f"{'`' * fence}{{py:{kind}}} {head}"
    yield from options
    yield ""
    yield from body
    yield "`" * fence
    yield ""


def members(node: ast.ClassDef, module: str) -> Iterator[str]:
    """Public fields of which a comment says more, then public methods and properties."""
    lines = source(module)[0].splitlines()
    text = ast.get_docstring(node) or ""
    methods: dict[str, ast.FunctionDef] = {}
    for at, child in enumerate(node.body):
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            methods[child.name] = child  # the last of its overloads
        elif isinstance(child, ast.AnnAssign | ast.Assign):
            target = child.target if isinstance(child, ast.AnnAssign) else child.targets[0]
            name, after = ast.unparse(target), node.body[at + 1 : at + 2]
            said = lines[child.lineno - 1].partition("  # ")[2]
            if after and isinstance(after[0], ast.Expr) and isinstance(after[0].value, ast.Constant):
                said = str(after[0].value.value)
            if isinstance(child, ast.AnnAssign):
                options = [f":type: {ast.unparse(child.annotation)}"]
            else:
                options = [f":value: {ast.unparse(child.value)}"]
            if said and not name.startswith("_") and f"    {name}: " not in text:  # the signature has them all
                yield from block("attribute", name, options, [said], 4)
    for name, method in methods.items():
        kinds = [ast.unparse(decorator) for decorator in method.decorator_list]
        options = [f":{kind}:" for kind in ("classmethod", "staticmethod", "abstractmethod") if kind in kinds]
        if any("property" in kind for kind in kinds):
            result = [f":type: {ast.unparse(method.returns)}"] if method.returns else []
            yield from block("property", name, [*options, *result], documented(method), 4)
        elif not any(kind.endswith(".setter") for kind in kinds):
            head = name + signature(method, module, "staticmethod" not in kinds)
            yield from block("method", head, options, documented(method), 4)


def described(package: str, name: str) -> Iterator[str]:
    """All that a page says of a name."""
    module, node = definition(package, name)
    options = [f":module: {package}"]
    if isinstance(node, ast.FunctionDef):
        yield from block("function", name + signature(node, module, bound=False), options, documented(node), 5)
    elif isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases]
        made = [child for child in node.body if isinstance(child, ast.FunctionDef) and child.name == "__init__"]
        fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
        head = name
        if made:
            head += signature(made[0], module, bound=True)
        elif RECORDS.search(" ".join([*bases, *map(ast.unparse, node.decorator_list)])):
            head += f"({', '.join(ast.unparse(field) for field in fields if ast.unparse(field)[0] != '_')})"
        above = [f"Bases: {', '.join(f'`{base}`' for base in bases)}", ""] if bases else []
        yield from block("class", head, options, [*above, *documented(node), *members(node, module)], 5)
    else:
        yield from block("data", name, options, [f"`{ast.unparse(node)}`"], 5)


class Api(SphinxDirective):
    """Each name of the content, as the package exports it."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        (package,) = self.arguments
        for name in self.content:
            self.env.note_dependency(str(path_of(definition(package, name)[0])))
        return self.parse_text_to_nodes("\n".join(line for name in self.content for line in described(package, name)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("api", Api)
    return {"parallel_read_safe": True}
