"""The rooms' imports run one way, and the house rules that a parser can check."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("engine", "baselines", "sweeps", "analysis")
ALLOWED = {
    "engine": {"engine": None},
    "baselines": {"baselines": None, "engine": {"engine"}},  # the engine's public names only
    "sweeps": {"sweeps": None, "baselines": None, "engine": None},
    "analysis": {
        "analysis": None,
        "sweeps": {
            f"sweeps.{name}"
            for name in (
                "agreement",
                "command_line",
                "identity",
                "result",
                "rowfile",
                "runfile",
            )
        },
    },
}
"""Room -> room it may import from -> modules it may import (None: any)."""
ONLY_IN = {
    "hydra": {"sweeps"},
    "omegaconf": {"sweeps"},
    "wandb": {"sweeps", "analysis"},
    "transformers": {"baselines", "sweeps"},
}
"""Library -> rooms that may import it."""
ENGINE_LIBRARIES = {"torch", "safetensors"}


def imports(path: Path) -> set[str]:
    """Modules a file imports, anywhere in it; `from a import b` counts as a.b where that is a
    module of ours."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if _is_module(name)}
            found |= modules or {node.module}
    return found


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return name.split(".")[0] in ROOMS and (
        path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    )


FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_imports_run_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        top = name.split(".")[0]
        if top in ROOMS:
            assert top in ALLOWED[room], f"{room} imports {name}"
            assert ALLOWED[room][top] is None or name in ALLOWED[room][top], (
                f"{room} imports {name}"
            )
        if top in ONLY_IN:
            assert room in ONLY_IN[top], f"{room} imports {name}"


def module_of(path: Path) -> str:
    """The name that a file is imported by."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_imports_go_in_a_circle():
    """Wherever they are written, inside functions and behind TYPE_CHECKING too."""
    graph = {module_of(path): imports(path) for path in FILES}
    graph = {name: {other for other in found if other in graph} for name, found in graph.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


CORE = (
    "trainer",
    "blocks",
    "config",
    "step",
    "waits",
    "executor",
    "lanes",
    "device",
    "store",
    "layout",
    "adamw",
    "sizes",
)
"""The engine's files that run decided steps, and what they are made of."""


def test_the_core_of_the_engine_does_not_know_the_planner():
    seen, todo = set(), {f"engine.{name}" for name in CORE}
    while todo:
        name = todo.pop()
        seen.add(name)
        path = ROOT / (name.replace(".", "/") + ".py")
        todo |= {other for other in imports(path) if other.startswith("engine.")} - seen
    assert not {name for name in seen if "planner" in name or name == "engine.megatrain"}


def test_the_engine_needs_torch_alone():
    for path in (ROOT / "engine").rglob("*.py"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top in ENGINE_LIBRARIES | {"engine"}, (
                f"{path.name} imports {name}"
            )


def test_a_command_is_there_without_the_compiler_and_transformers():
    """They take two seconds to import, which only a cell needs."""
    program = "import sys; from sweeps import plan, run; print({'torch._dynamo', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_only_the_lanes_touch_streams():
    for path in (ROOT / "engine").rglob("*.py"):
        if path.name != "lanes.py":
            text = path.read_text()
            assert "torch.cuda.Stream(" not in text, path.name
            assert "torch.cuda.stream(" not in text, path.name
            assert "wait_event" not in text, path.name


@pytest.mark.parametrize("path", FILES, ids=identifier)
def test_files_say_what_they_are_and_functions_stay_short(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "a file opens with what it is"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= 80, f"{node.name} has {length} lines"
