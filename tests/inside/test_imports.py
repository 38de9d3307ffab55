"""What plimsoll.inside imports: the standard library and itself, so that it loads beside every vLLM since 0.8.0."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.each import each

INSIDE = Path(__file__).parents[2] / "src" / "plimsoll" / "inside"
FILES = sorted(INSIDE.rglob("*.py"))
OURS = ("plimsoll.errors", "plimsoll.inside")
VERSION = ("plimsoll", "plimsoll.__version__")
NEEDS_VLLM = {"stat_logger.py"}  # a subclass of vLLM's; nobody but vLLM or the gate imports it

LOADED = """
import json, sys
before = set(sys.modules)
import plimsoll.inside
package = set(sys.modules) - before
from plimsoll.inside import Gate, Probe
print(json.dumps([sorted(package), sorted(set(sys.modules) - before)]))
"""


def _at_import(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is loaded: those outside functions and outside `if TYPE_CHECKING`."""
    found: list[ast.Import | ast.ImportFrom] = []
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        is_late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        is_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        todo += [] if is_late or is_types else list(ast.iter_child_nodes(node))
    return found


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "plimsoll":
        return [f"plimsoll.{alias.name}" for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


@each("path", [path for path in FILES if path.name not in NEEDS_VLLM], ids=lambda path: path.name)
def test_loading_a_module_needs_the_standard_library_alone(path: Path) -> None:
    """What vLLM brings is imported in functions, when it is there; nothing of plimsoll that stays at home is."""
    for node in _at_import(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0, f"{path.name}:{node.lineno}: a relative import"
        for name in _names(node):
            is_standard = name.partition(".")[0] in sys.stdlib_module_names
            assert is_standard or name in VERSION or name.startswith(OURS), f"{path.name}:{node.lineno} imports {name}"


@each("path", FILES, ids=lambda path: path.name)
def test_nothing_calls_for_a_foreign_module_while_it_loads(path: Path) -> None:
    """`import_module` outside functions is an import too; the stat logger alone may."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    todo: list[ast.AST] = [] if path.name in NEEDS_VLLM else list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        assert called not in ("import_module", "__import__"), f"{path.name}:{getattr(node, 'lineno', 0)}"
        todo += list(ast.iter_child_nodes(node))


def test_the_package_is_light_and_its_halves_bring_nothing_foreign() -> None:
    """`import plimsoll.inside` opens no socket and binds no library; Gate and Probe come with nothing from outside."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", LOADED], capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": str(INSIDE.parents[1]), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    package, everything = json.loads(done.stdout)
    assert not {"socket", "ctypes", "asyncio", "subprocess", "multiprocessing", "ssl"} & set(package)
    tops = {name.partition(".")[0] for name in everything} - {"plimsoll", "__mp_main__"}
    assert tops <= set(sys.stdlib_module_names)
    assert not {"torch", "vllm", "prometheus_client", "h11", "pynvml"} & tops
