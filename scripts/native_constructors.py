"""Writes the constructors of dataclasses out, so that mypyc compiles them.

mypyc makes a dataclass a native class, but `dataclass` itself writes `__init__`, as interpreted
code that sets attribute by attribute: several times the cost of a compiled one. A simulated request
makes about fifty such values. `scripts/compile_simulator.py` rewrites its copy of the sources with
this; a rewritten class has the same fields, equality and hash, and is mutable.
Tests: tests/unit/packaging/test_native_constructors.py.
"""

from __future__ import annotations

import ast
from collections.abc import Collection


def base_names(trees: Collection[ast.Module]) -> set[str]:
    """Returns the names of all classes that others derive from."""
    return {
        ast.unparse(base).partition("[")[0].rpartition(".")[2]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }


def with_constructors(source: str, derived_from: Collection[str]) -> str:
    """Returns a module's source with the constructors of its dataclasses written out.

    Args:
        derived_from: names of classes that stay as they are, as do those that derive from another:
            a frozen dataclass and one that is not cannot be mixed.
    """
    lines = source.splitlines(keepends=True)
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    for node in sorted(classes, key=lambda each: each.lineno, reverse=True):
        decorator = _dataclass(node)
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        has_own = any(getattr(each, "name", "") == "__init__" for each in node.body)
        if decorator is None or has_own or not fields or node.bases or node.name in derived_from:
            continue
        last = fields[-1].end_lineno
        end = decorator.end_lineno
        assert last is not None, "parsed from source"
        assert end is not None, "parsed from source"
        lines[last:last] = _constructor(node, fields)
        lines[decorator.lineno - 1 : end] = [_decorator(decorator)]
    return "".join(lines)


def _dataclass(node: ast.ClassDef) -> ast.Call | None:
    """Returns a class's only decorator if that is `dataclass(...)`."""
    match node.decorator_list:
        case [ast.Call(func=ast.Name(id="dataclass")) as decorator]:
            return decorator
    return None


def _decorator(decorator: ast.Call) -> str:
    options = {str(each.arg): ast.unparse(each.value) for each in decorator.keywords}
    # A constructor sets attributes, which a frozen class does not allow; the hash stays.
    if options.pop("frozen", "False") == "True" and options.get("eq", "True") == "True":
        options["unsafe_hash"] = "True"
    options["init"] = "False"
    return f"@dataclass({', '.join(f'{name}={value}' for name, value in options.items())})\n"


def _constructor(node: ast.ClassDef, fields: Collection[ast.AnnAssign]) -> list[str]:
    arguments, body = ["self"], []
    for each in fields:
        assert isinstance(each.target, ast.Name), f"a field of {node.name} has no name"
        name, kind = each.target.id, ast.unparse(each.annotation)
        default, factory = _default(each.value)
        stored = name
        if factory:
            stored = f"{factory}() if {name} is None else {name}"
            kind, default = f"{kind} | None", "None"
        arguments.append(f"{name}: {kind}{f' = {default}' if default else ''}")
        body.append(f"        self.{name} = {stored}\n")
    if any(getattr(each, "name", "") == "__post_init__" for each in node.body):
        body.append("        self.__post_init__()\n")
    return ["\n", f"    def __init__({', '.join(arguments)}) -> None:\n", *body, "\n"]


def _default(value: ast.expr | None) -> tuple[str, str]:
    """Returns the default of a field and the function that makes it, as source; empty for none."""
    match value:
        case None:
            return "", ""
        case ast.Call(func=ast.Name(id="field"), keywords=keywords):
            options = {str(each.arg): ast.unparse(each.value) for each in keywords}
            assert options.keys() <= {"default", "default_factory", "repr"}, "another kind of field"
            return options.get("default", ""), options.get("default_factory", "")
    return ast.unparse(value), ""
