"""The flags of `vllm serve` in one release, read from the functions that build its argument parser."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.catalogue.source_tree import (
    UNKNOWN,
    ClassRef,
    Evaluator,
    External,
    FunctionRef,
    SourceTree,
    TypeUse,
    Wrapped,
    is_plain,
    last_name,
)

# Where the parser of `vllm serve` is built, newest layout first. `--config` and the model were added by the
# sub-command itself in older releases.
PARSER_BUILDERS = (
    ("vllm.entrypoints.launchers.cli_args", "make_arg_parser"),
    ("vllm.entrypoints.openai.cli_args", "make_arg_parser"),
    ("vllm.entrypoints.openai.api_server", "parse_args"),
)
SUBCOMMANDS = (
    ("vllm.entrypoints.cli.serve", "ServeSubcommand", "subparser_init"),
    ("vllm.scripts", None, "main"),
)


@dataclass
class Flag:
    """One `add_argument` call of the release."""

    names: list[str]
    keywords: dict[str, Any] = field(default_factory=dict)


def read_flags(tree: SourceTree) -> list[dict[str, Any]]:
    """Every flag of `vllm serve` as a plain row: names, kind, nargs, choices, default, deprecated."""
    reader = _Reader(tree)
    for module, name in PARSER_BUILDERS:
        found = tree.resolve(module, name)
        if found is not None and isinstance(found[1], ast.FunctionDef):
            reader.run_function(FunctionRef(found[0], name, found[1]), [_PARSER], {})
            break
    else:
        raise LookupError(f"{tree.root}: no parser of `vllm serve` found")
    for module, owner, name in SUBCOMMANDS:
        reader.run_subcommand(module, owner, name)
    rows = [_row(flag) for flag in reader.flags if flag.names[0].startswith("-")]
    return list({row["name"]: row for row in rows}.values())


_PARSER = External("parser")


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Reader:
    """Runs the statements that build a parser, with unknown values staying unknown."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.evaluator = Evaluator(tree)
        self.flags: list[Flag] = []

    def run_subcommand(self, module: str, owner: str | None, name: str) -> None:
        """Flags that the `serve` sub-command adds beside the shared parser."""
        found = self.tree.resolve(module, owner or name)
        if found is None:
            return
        node = found[1]
        if owner is not None and isinstance(node, ast.ClassDef):
            node = next((s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == name), node)
        if not isinstance(node, ast.FunctionDef):
            return
        for call in ast.walk(node):
            # `vllm.scripts` builds several sub-commands in one function: take those of the serve parser only.
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == "add_argument"
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id == "serve_parser"
            ):
                self._add_argument(call, found[0], {})

    def run_function(self, function: FunctionRef, arguments: list[Any], keywords: Mapping[str, Any]) -> Any:
        """Run a parser-building function and return what it returns."""
        parameters = function.node.args
        names = [a.arg for a in parameters.args]
        scope: dict[str, Any] = dict(zip(names, arguments, strict=False))
        defaults = parameters.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            scope.setdefault(name, self.evaluator.value(default, function.module, {}))
        scope.update(keywords)
        try:
            self._run(function.node.body, function.module, scope)
        except _Return as result:
            return result.value
        return None

    def _run(self, body: list[ast.stmt], module: str, scope: dict[str, Any]) -> None:
        for statement in body:
            self._statement(statement, module, scope)

    def _statement(self, node: ast.stmt, module: str, scope: dict[str, Any]) -> None:
        match node:
            case ast.Expr(value=ast.Call() as call):
                self._call(call, module, scope)
            case ast.Assign(targets=[target], value=value):
                self._assign(target, self._value(value, module, scope), module, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, self._value(value, module, scope), module, scope)
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        owner = self._value(target.value, module, scope)
                        if isinstance(owner, dict):
                            owner.pop(self._value(target.slice, module, scope), None)
            case ast.If(test=test, body=body, orelse=orelse):
                decided = self._value(test, module, scope)
                if decided is not False:
                    self._run(body, module, scope)
                if decided is not True:
                    self._run(orelse, module, scope)
            case ast.For(target=target, iter=iterable, body=body):
                items = self._value(iterable, module, scope)
                for item in list(items) if isinstance(items, list | tuple) else []:
                    self._assign(target, item, module, scope)
                    self._run(body, module, scope)
            case ast.With(body=body) | ast.Try(body=body):
                self._run(body, module, scope)
            case ast.FunctionDef():
                scope[node.name] = FunctionRef(module, node.name, node)
            case ast.ImportFrom():
                for alias in node.names:
                    found = self.tree.resolve(node.module or "", alias.name)
                    if found is not None and isinstance(found[1], ast.ClassDef):
                        scope[alias.asname or alias.name] = ClassRef(found[0], alias.name, found[1])
            case ast.Return(value=value):
                raise _Return(self._value(value, module, scope) if value is not None else None)

    def _assign(self, target: ast.expr, value: Any, module: str, scope: dict[str, Any]) -> None:
        match target:
            case ast.Name(id=name):
                scope[name] = value
            case ast.Tuple(elts=elements) if isinstance(value, list | tuple) and len(value) == len(elements):
                for element, part in zip(elements, value, strict=True):
                    self._assign(element, part, module, scope)
            case ast.Subscript(value=owner_node, slice=index):
                owner = self._value(owner_node, module, scope)
                if isinstance(owner, dict):
                    key = self._value(index, module, scope)
                    owner[key] = value
                    if key == "type":  # the type that made it optional is gone
                        owner.pop("optional", None)

    def _value(self, node: ast.expr, module: str, scope: dict[str, Any]) -> Any:
        if isinstance(node, ast.Call):
            return self._call(node, module, scope)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):  # get_kwargs(X)["field"]
            owner = self._call(node.value, module, scope)
            if isinstance(owner, dict):
                return owner.get(self._value(node.slice, module, scope), UNKNOWN)
        return self.evaluator.value(node, module, scope)

    def _call(self, call: ast.Call, module: str, scope: dict[str, Any]) -> Any:
        name = last_name(call.func)
        if name == "add_argument":
            self._add_argument(call, module, scope)
            return UNKNOWN
        if name in ("add_argument_group", "FlexibleArgumentParser", "ArgumentParser"):
            return _PARSER
        arguments = [self._value(a, module, scope) for a in call.args]
        if name in ("get_kwargs", "_compute_kwargs") and isinstance(arguments[0], ClassRef):
            return self.keywords_from_class(arguments[0], local="get_kwargs" in scope)
        if name in ("update", "remove") and isinstance(call.func, ast.Attribute) and len(arguments) == 1:
            owner = self._value(call.func.value, module, scope)
            if isinstance(owner, dict) and isinstance(arguments[0], dict):
                owner.update(arguments[0])
            elif isinstance(owner, list) and arguments[0] in owner:
                owner.remove(arguments[0])
        keywords = {k.arg: self._value(k.value, module, scope) for k in call.keywords if k.arg}
        method = self._parser_method(call.func, module, scope)
        if method is not None:
            function, owner = method
            is_static = any(last_name(d) == "staticmethod" for d in function.node.decorator_list)
            return self.run_function(function, arguments if is_static else [owner, *arguments], keywords)
        return self.evaluator.value(call, module, scope)

    def _parser_method(self, func: ast.expr, module: str, scope: dict[str, Any]) -> tuple[FunctionRef, ClassRef] | None:
        """A method of a class of ours that goes on building the parser."""
        if not isinstance(func, ast.Attribute) or func.attr not in ("add_cli_args", "_customize_cli_kwargs"):
            return None
        is_super = isinstance(func.value, ast.Call) and last_name(func.value.func) == "super"
        owner = scope.get("cls") if is_super else self.evaluator.value(func.value, module, scope)
        if not isinstance(owner, ClassRef):
            return None
        for cls in self.evaluator.lineage(owner)[1 if is_super else 0 :]:
            for statement in cls.node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == func.attr:
                    return FunctionRef(cls.module, statement.name, statement), owner
        return None

    def _add_argument(self, call: ast.Call, module: str, scope: dict[str, Any]) -> None:
        names: list[Any] = []
        for argument in call.args:
            value = self._value(argument.value if isinstance(argument, ast.Starred) else argument, module, scope)
            names.extend(value if isinstance(argument, ast.Starred) and isinstance(value, list) else [value])
        names = [n for n in names if isinstance(n, str)]
        keywords: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self._value(keyword.value, module, scope)
            if keyword.arg is None:
                keywords.update(value if isinstance(value, dict) else {})
            else:
                keywords[keyword.arg] = value
        if names:
            self.flags.append(Flag(names, dict(keywords)))

    def keywords_from_class(self, cls: ClassRef, *, local: bool) -> dict[str, dict[str, Any]]:
        """What vLLM's own `get_kwargs` makes of a config class: one entry a field."""
        made: dict[str, dict[str, Any]] = {}
        for owner in reversed(self.evaluator.lineage(cls)):
            for statement, after in zip(owner.node.body, [*owner.node.body[1:], None], strict=True):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    name = statement.target.id
                    default = self.evaluator.default_of(statement.value, owner.module) if statement.value else UNKNOWN
                    hints = list(self._hints(self._annotation(statement.annotation, owner.module)))
                    made[name] = {"default": default, **self._keywords_from_hints(name, hints, local=local)}
                    extra = self._declared_flags(statement.value, owner.module)
                    if extra:
                        made[name]["flags"] = extra
                    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                        made[name]["help"] = after.value.value
        return made

    def _declared_flags(self, node: ast.expr | None, module: str) -> list[str]:
        """Further spellings that a field declares in its metadata, such as an alias."""
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in ("metadata", "json_schema_extra"):
                    value = self.evaluator.value(keyword.value, module, {})
                    if isinstance(value, dict) and isinstance(value.get("flags"), list):
                        return [f for f in value["flags"] if isinstance(f, str)]
        return []

    def _annotation(self, node: ast.expr, module: str) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return UNKNOWN
        return self.evaluator.value(node, module, {})

    def _hints(self, hint: Any) -> Iterator[Any]:
        """The alternatives of a type, with Optional, Union and Annotated taken apart."""
        if isinstance(hint, TypeUse) and hint.origin in ("union", "optional"):
            for argument in hint.arguments:
                yield from self._hints(argument)
            if hint.origin == "optional":
                yield None
        elif isinstance(hint, TypeUse) and hint.origin in ("annotated", "skipvalidation", "initvar", "classvar"):
            yield from self._hints(hint.arguments[0])
        else:
            yield hint

    def _keywords_from_hints(self, name: str, hints: list[Any], *, local: bool) -> dict[str, Any]:
        """The rules of vLLM's `get_kwargs`, in its order."""
        optional = None in hints
        origins = {("dict" if self._is_dict(h) else _origin(h)): h for h in hints}
        if local:  # 0.8.4 alone: the first form of that function
            if hints == [External("bool")]:
                return {}
            return {"type": External("str") if optional or "str" in origins else hints[0]}
        found = self._typed(name, origins, optional=optional)
        # vLLM reads "None" and nothing at all as not set, for what may be None and is no switch.
        return {**found, "optional": True} if optional and "bool" not in origins else found

    def _typed(self, name: str, origins: dict[str, Any], *, optional: bool) -> dict[str, Any]:
        if "dataclass" in origins and self._is_dataclass(origins["dataclass"]):
            return {"type": External("json.loads")}
        if set(origins) == {"bool", "str", "None"}:
            return {"type": External("str"), "nargs": "?", "const": True}
        if "bool" in origins:
            return {"action": External("argparse.BooleanOptionalAction")}
        if "literal" in origins:
            choices = [c for c in origins["literal"].arguments if is_plain(c)]
            complete = len(choices) == len(origins["literal"].arguments)
            kind = External(type(choices[0]).__name__ if choices else "str")
            if "str" in origins or not complete:
                return {"type": kind}
            return {"type": kind, "choices": [*sorted(choices), *(["None"] if optional else [])]}
        for collection in ("tuple", "list", "set"):
            if collection in origins:
                return self._collection(collection, origins[collection], optional=optional)
        if "int" in origins:
            return {"type": External(self.integer_kind(name))}
        if "float" in origins:
            return {"type": External("float")}
        if "dict" in origins:
            return {"type": External("json_or_str" if set(origins) - {"dict", "None"} else "json.loads")}
        return {"type": External("str")}

    def _is_dataclass(self, hint: Any) -> bool:
        if not isinstance(hint, ClassRef):
            return False
        return any(last_name(d.func if isinstance(d, ast.Call) else d) in ("dataclass", "config", "pydantic_dataclass")
                   for c in self.evaluator.lineage(hint) for d in c.node.decorator_list)  # fmt: skip

    def _is_dict(self, hint: Any) -> bool:
        return isinstance(hint, ClassRef) and any(
            last_name(b.value if isinstance(b, ast.Subscript) else b) in ("dict", "Dict", "TypedDict")
            for c in self.evaluator.lineage(hint)
            for b in c.node.bases
        )

    def _collection(self, origin: str, hint: Any, *, optional: bool) -> dict[str, Any]:
        inner = list(hint.arguments) if isinstance(hint, TypeUse) else [External("str")]
        element = list(self._hints(inner[0]))
        keywords: dict[str, Any] = {"type": element[0] if len(element) == 1 else External("str"), "nargs": "+"}
        if origin == "tuple" and Ellipsis not in inner:
            keywords["nargs"] = len(inner)
        if isinstance(keywords["type"], TypeUse) and keywords["type"].origin == "literal":
            choices = [c for c in keywords["type"].arguments if is_plain(c)]
            listed = [*sorted(choices), *(["None"] if optional else [])]
            keywords.update(type=External(type(choices[0]).__name__ if choices else "str"), choices=listed)
        return keywords

    def integer_kind(self, name: str) -> str:
        """Whether this release reads `16k` for the integer field `name`."""
        if name in self._human_integers.get("auto", ()):
            return "human_readable_int_or_auto"
        return "human_readable_int" if name in self._human_integers.get("plain", ()) else "int"

    @property
    def _human_integers(self) -> Mapping[str, set[str]]:
        cached = getattr(self, "_human", None)
        if cached is None:
            cached = self._human = _human_integer_fields(self.tree)
        return cached


def _human_integer_fields(tree: SourceTree) -> dict[str, set[str]]:
    """The fields that `get_kwargs` names as human-readable, found next to the function it gives them."""
    path = tree.path_of("vllm.engine.arg_utils")
    assert path is not None, f"{tree.root}: vllm/engine/arg_utils.py is missing"
    found: dict[str, set[str]] = {"plain": set(), "auto": set()}
    for function in ast.walk(tree.parse(path)):
        if not isinstance(function, ast.FunctionDef) or function.name not in ("get_kwargs", "_compute_kwargs"):
            continue
        named_sets = {
            s.targets[0].id: _strings(s.value)
            for s in ast.walk(function)
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name) and isinstance(s.value, ast.Set)
        }
        for branch in ast.walk(function):
            if not isinstance(branch, ast.If) or not isinstance(branch.test, ast.Compare):
                continue
            compared = branch.test.comparators[0]
            names = named_sets.get(compared.id, set()) if isinstance(compared, ast.Name) else _strings(compared)
            text = " ".join(ast.unparse(s) for s in branch.body)
            if "human_readable_int_or_auto" in text:
                found["auto"] |= names
            elif "human_readable_int" in text:
                found["plain"] |= names
    return found


def _strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _origin(hint: Any) -> str:
    if hint is None:
        return "None"
    if isinstance(hint, TypeUse):
        return {"literalstring": "str"}.get(hint.origin, hint.origin)
    if isinstance(hint, ClassRef):
        return "dataclass"
    if isinstance(hint, External):
        return {"Dict": "dict", "List": "list", "Tuple": "tuple", "Set": "set"}.get(
            hint.dotted.rsplit(".", 1)[-1], hint.dotted.rsplit(".", 1)[-1]
        )
    return "other"


_KINDS = {
    "int": "int", "float": "float", "str": "str", "bool": "bool", "json.loads": "json", "json_or_str": "json-or-text",
    "nullable_str": "str", "nullable_kvs": "key-value", "human_readable_int": "human-int",
    "human_readable_int_or_auto": "human-int-or-auto", "union_dict_and_str": "json-or-text", "loads": "json",
}  # fmt: skip


def _kind(value: Any) -> str:
    """What a value of this flag must look like, in our words."""
    if isinstance(value, External | FunctionRef):
        dotted = value.dotted if isinstance(value, External) else value.name
        return _KINDS.get(dotted, _KINDS.get(dotted.rsplit(".", 1)[-1], "other"))
    if isinstance(value, Wrapped) and value.name in ("optional_type", "parse_type") and value.arguments:
        return _kind(value.arguments[0])
    if isinstance(value, ClassRef):
        return "json"
    return "other"


def _row(flag: Flag) -> dict[str, Any]:
    """One flag as plain data; keys that would say nothing are left out."""
    keywords = flag.keywords
    names = [n.replace("_", "-") if n.startswith("--") else n for n in flag.names]
    long_names = [n for n in names if n.startswith("--")] or names
    row: dict[str, Any] = {"name": long_names[0]}
    aliases = [n for n in names if n != row["name"]]
    if aliases:
        row["aliases"] = sorted(aliases)
    action = keywords.get("action")
    action_name = action if isinstance(action, str) else last_part(action)
    if action_name in ("store_true", "store_false", "store_const"):
        row["kind"] = "switch"
    elif action_name == "BooleanOptionalAction":
        row["kind"] = "on-off"
    elif action_name == "StoreBoolean":
        row.update(kind="true-false", nargs="?")
    else:
        row["kind"] = _kind(keywords["type"]) if "type" in keywords else "str"
        if action_name == "append":
            row["repeats"] = True
        elif action_name and ("deprecat" in action_name.lower()):
            row["deprecated"] = True
    kind = keywords.get("type")
    wrapper = kind.name if isinstance(kind, Wrapped) else last_part(kind)
    if keywords.get("optional") is True or wrapper in ("optional_type", "nullable_str", "nullable_kvs"):
        row["optional"] = True
    if keywords.get("nargs") is not None and is_plain(keywords["nargs"]):
        row["nargs"] = keywords["nargs"]
    choices = keywords.get("choices")
    if isinstance(choices, list | tuple) and choices and is_plain(choices):  # empty: made when it runs, so not known
        row["choices"] = [str(c) for c in choices]
    row.update(_default(keywords, action_name))
    if keywords.get("deprecated") is True or _says_deprecated(keywords.get("help")):
        row["deprecated"] = True
    return row


def _default(keywords: dict[str, Any], action_name: str) -> dict[str, Any]:
    default = keywords.get("default", action_name == "store_false" if action_name.startswith("store_") else None)
    if isinstance(default, tuple | set | frozenset):
        default = list(default)
    if isinstance(default, Wrapped) and default.name == "instance":
        return {"default": {}}  # a config object whose own fields have the defaults
    return {"default": default} if is_plain(default) else {}


def _says_deprecated(help_text: Any) -> bool:
    """Whether the first sentence of a help text says so of the flag itself."""
    if not isinstance(help_text, str):
        return False
    first = re.split(r"\.\s", help_text.strip(), maxsplit=1)[0]
    return bool(re.search(r"^\W*deprecated\b|\[deprecated\]|(flag|argument|option|--[\w-]+`?) is deprecated", first, re.I))


def last_part(value: Any) -> str:
    """The last word of a dotted or referenced name."""
    if isinstance(value, External):
        return value.dotted.rsplit(".", 1)[-1]
    return value.name if isinstance(value, ClassRef | FunctionRef) else ""
