"""The layers of the package: imports go down, and planning imports no torch.

The checker reads the source of every module, with the imports inside functions and under TYPE_CHECKING; two tests
also import it in a process of their own. Each check is shown to fail on a small package that breaks its rule.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import nestsp

ROOT = Path(nestsp.__file__).parent

# Lowest first. A file imports from rows above its own, from its own folder, and, where a row holds single files, from
# those: they lie in one folder too. `comm` and `attention` are one layer of the design, in this order.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "units"),
    ("config", "cluster", "shape", "batch", "known_models"),
    ("data", "cost"),
    ("plan", "schedule", "shard"),
    ("moves", "simulate"),
    ("planners",),
    ("report",),
    ("comm",),
    ("attention",),
    ("model",),
    ("execute",),
    ("train",),
    ("cli", "integrations"),
)
ROW_OF = {part: row for row, parts in enumerate(LAYERS) for part in parts}
FIRST_TORCH_ROW = ROW_OF["comm"]
FORBIDDEN = {("execute", "planners"): "the executor runs plans and makes none"}

# What brings torch with it when imported.
TORCH = ("accelerate", "flash_attn", "safetensors.torch", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Import:
    """One import: the dotted name it asks for, its line, and whether it runs when its module is imported."""

    name: str
    line: int
    at_import: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One source file and its imports."""

    name: str
    path: str
    part: str
    is_package: bool
    imports: tuple[Import, ...]

    @property
    def is_exempt(self) -> bool:
        return self.part in ("__init__", "__main__")

    @property
    def is_single_file(self) -> bool:
        return not self.is_package and self.name.count(".") == 1


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def find_imports(tree: ast.Module, package: str) -> Iterator[Import]:
    """Every import in a module of `package`, by any spelling whose name is a literal."""
    stack: list[tuple[ast.AST, bool]] = [(tree, True)]
    while stack:
        node, at_import = stack.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                relative = first.value.startswith(".")
                yield Import(f"{package}{first.value}" if relative else first.value, node.lineno, at_import)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack += [(child, False) for child in ast.iter_child_nodes(node)]
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            stack += [(child, False) for child in node.body]
            stack += [(child, at_import) for child in node.orelse]
        else:
            stack += [(child, at_import) for child in ast.iter_child_nodes(node)]


def read_modules(root: Path) -> dict[str, Module]:
    """Every module below `root`, a package's folder, by its dotted name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        is_package = path.name == "__init__.py"
        names = (root.name, *inside.parent.parts, *(() if is_package else (path.stem,)))
        name = ".".join(names)
        package = name if is_package else name.rpartition(".")[0]
        imports = sorted(find_imports(ast.parse(path.read_text(), str(path)), package), key=lambda i: i.line)
        part = inside.parts[0].removesuffix(".py")
        modules[name] = Module(name, f"{root.name}/{inside.as_posix()}", part, is_package, tuple(imports))
    return modules


def resolve(name: str, modules: dict[str, Module]) -> Module | None:
    """The module that a dotted name is or lies in; None for one outside the package."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return modules.get(name)


def brings_torch(name: str) -> bool:
    return any(name == torch or name.startswith(f"{torch}.") for torch in TORCH)


def path_to_torch(module: Module, modules: dict[str, Module], at_import_only: bool) -> list[str] | None:
    """The shortest chain of `file:line` from a module to an import of torch, or None."""
    queue: list[tuple[Module, list[str]]] = [(module, [])]
    seen = {module.name}
    for current, steps in queue:
        for found in current.imports:
            if at_import_only and not found.at_import:
                continue
            here = [*steps, f"{current.path}:{found.line}"]
            if brings_torch(found.name):
                return [*here, found.name]
            target = resolve(found.name, modules)
            if target is None:
                continue
            # Importing a.b.c runs a and a.b first.
            names = target.name.split(".")
            for runs in (".".join(names[: i + 1]) for i in range(1, len(names))):
                if runs in modules and runs not in seen:
                    seen.add(runs)
                    queue.append((modules[runs], here))
    return None


def check_import(module: Module, found: Import, modules: dict[str, Module]) -> str | None:
    """What is wrong with one import of a module, or None."""
    target = resolve(found.name, modules)
    if target is None:
        return None
    if target.part == "__init__":
        rest = found.name.partition(".")[2]
        is_dunder = rest.startswith("__") and rest.endswith("__")
        return None if is_dunder else f"imports {found.name} from the root; import it from the module that defines it"
    reason = FORBIDDEN.get((module.part, target.part))
    if reason is not None:
        return f"imports {target.name}, but {reason}"
    if module.part == target.part or target.part not in ROW_OF:
        return None
    row, target_row = ROW_OF[module.part], ROW_OF[target.part]
    is_one_folder = row == target_row and module.is_single_file and target.is_single_file
    if target_row < row or is_one_folder:
        return None
    return f"imports {target.name}, but {target.part} is not below {module.part}"


def find_violations(root: Path) -> list[str]:
    """Every breach of the layers in the package at `root`, as `file:line: sentence`."""
    modules = read_modules(root)
    violations = []
    for module in modules.values():
        if module.is_exempt:
            chain_to_torch = path_to_torch(module, modules, at_import_only=True)
        elif module.part not in ROW_OF:
            violations.append(f"{module.path}:1: has no layer")
            continue
        else:
            for found in module.imports:
                wrong = check_import(module, found, modules)
                if wrong is not None:
                    violations.append(f"{module.path}:{found.line}: {wrong}")
            is_low = ROW_OF[module.part] < FIRST_TORCH_ROW
            chain_to_torch = path_to_torch(module, modules, at_import_only=False) if is_low else None
        if chain_to_torch is not None:
            violations.append(f"{chain_to_torch[0]}: imports torch: {' -> '.join(chain_to_torch)}")
    return violations


def observe(code: str, folder: Path) -> list[str]:
    """Run `code` in an interpreter of its own that finds packages in `folder` first; the list it assigns to `seen`."""
    program = f"import json, os, sys; sys.path.insert(0, {str(folder)!r})\n{code}\nprint(json.dumps(seen))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=folder, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen: list[str] = json.loads(done.stdout.splitlines()[-1])
    return seen


def torch_loaded_by(names: Sequence[str], folder: Path) -> list[str]:
    """Which of torch and transformers are loaded after importing `names` from `folder`."""
    imports = "\n".join(f"import {name}" for name in names)
    return observe(f"{imports}\nseen = sorted({{'torch', 'transformers'}} & set(sys.modules))", folder)


def environment_changed_by(name: str, folder: Path) -> list[str]:
    """Which environment variables importing `name` from `folder` sets, changes or removes."""
    return observe(
        f"before = dict(os.environ)\nimport {name}\nafter = dict(os.environ)\n"
        "seen = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))",
        folder,
    )


def missing_exports(module: object) -> list[str]:
    """Names in a module's `__all__` that it does not have."""
    names: Sequence[str] = getattr(module, "__all__", ())
    return [name for name in names if not hasattr(module, name)]


def planning_modules(root: Path) -> list[str]:
    """The modules of all layers below torch, and the root with its `__main__`."""
    return [
        module.name
        for module in read_modules(root).values()
        if module.is_exempt or ROW_OF.get(module.part, FIRST_TORCH_ROW) < FIRST_TORCH_ROW
    ]


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """A package `nestsp` of these files; every folder gets an `__init__.py`."""
    root = folder / "nestsp"
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return root


def test_imports_go_down_and_planning_has_no_torch() -> None:
    assert find_violations(ROOT) == []


def test_importing_the_planning_half_loads_no_torch() -> None:
    assert torch_loaded_by(planning_modules(ROOT), ROOT.parent) == []


def test_importing_the_package_leaves_the_environment_alone() -> None:
    assert environment_changed_by("nestsp", ROOT.parent) == []


def test_every_name_in_all_exists() -> None:
    missing = {name: missing_exports(importlib.import_module(name)) for name in planning_modules(ROOT)}
    assert {name: gone for name, gone in missing.items() if gone} == {}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"plan.py": "\nimport nestsp.simulate\n", "simulate.py": ""},
            "nestsp/plan.py:2: imports nestsp.simulate, but simulate is not below plan",
            id="upward",
        ),
        pytest.param(
            {"plan.py": "def f():\n    from nestsp import simulate\n", "simulate.py": ""},
            "nestsp/plan.py:2: imports nestsp.simulate, but simulate is not below plan",
            id="upward-in-a-function",
        ),
        pytest.param(
            {
                "plan.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .simulate import x",
                "simulate.py": "",
            },
            "nestsp/plan.py:3: imports nestsp.simulate, but simulate is not below plan",
            id="upward-for-types",
        ),
        pytest.param(
            {"cost/model.py": "from ..planners.nsp import search", "planners/nsp.py": ""},
            "nestsp/cost/model.py:1: imports nestsp.planners.nsp, but planners is not below cost",
            id="upward-relative",
        ),
        pytest.param(
            {"data/store.py": "from nestsp.cost import bound", "cost/bound.py": ""},
            "nestsp/data/store.py:1: imports nestsp.cost.bound, but cost is not below data",
            id="sideways-between-folders",
        ),
        pytest.param(
            {"comm/groups.py": "import nestsp.attention.ring", "attention/ring.py": ""},
            "nestsp/comm/groups.py:1: imports nestsp.attention.ring, but attention is not below comm",
            id="comm-imports-attention",
        ),
        pytest.param(
            {"execute/executor.py": "from nestsp.planners import nsp", "planners/nsp.py": ""},
            "nestsp/execute/executor.py:1: imports nestsp.planners.nsp, but the executor runs plans and makes none",
            id="execute-imports-planners",
        ),
        pytest.param({"helpers.py": ""}, "nestsp/helpers.py:1: has no layer", id="no-layer"),
        pytest.param({"misc/a.py": ""}, "nestsp/misc/a.py:1: has no layer", id="folder-without-layer"),
        pytest.param(
            {
                "__init__.py": "from nestsp.plan import Plan",
                "plan.py": "",
                "cli/plan.py": "from nestsp import Plan",
            },
            "nestsp/cli/plan.py:1: imports nestsp.Plan from the root; import it from the module that defines it",
            id="through-the-root",
        ),
        pytest.param(
            {"shard.py": "def f():\n    import torch.distributed\n"},
            "nestsp/shard.py:2: imports torch: nestsp/shard.py:2 -> torch.distributed",
            id="torch-in-a-function",
        ),
        pytest.param(
            {"shape.py": "import importlib\nimportlib.import_module('transformers')"},
            "nestsp/shape.py:2: imports torch: nestsp/shape.py:2 -> transformers",
            id="torch-by-name",
        ),
        pytest.param(
            {"report/trace.py": "import nestsp.plan", "plan.py": "from safetensors.torch import load_file"},
            "nestsp/report/trace.py:1: imports torch: nestsp/report/trace.py:1 -> nestsp/plan.py:1"
            " -> safetensors.torch.load_file",
            id="torch-transitively",
        ),
        pytest.param(
            {"__init__.py": "from nestsp.train import step", "train/step.py": "import torch"},
            "nestsp/__init__.py:1: imports torch: nestsp/__init__.py:1 -> nestsp/train/step.py:1 -> torch",
            id="torch-by-the-root",
        ),
        pytest.param(
            {
                "__main__.py": "from nestsp.cli.main import main",
                "cli/main.py": "import nestsp.cli.train",
                "cli/train.py": "import torch",
            },
            "nestsp/__main__.py:1: imports torch: nestsp/__main__.py:1 -> nestsp/cli/main.py:1"
            " -> nestsp/cli/train.py:1 -> torch",
            id="torch-by-the-command",
        ),
    ],
)
def test_a_breach_is_found(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    assert expected in find_violations(write_package(tmp_path, files))


def test_a_sound_package_has_no_violation(tmp_path: Path) -> None:
    files = {
        "__init__.py": "__version__ = '1'\ndef __getattr__(name):\n    import nestsp.train.step\n",
        "__main__.py": "from nestsp.cli.main import main",
        "errors.py": "import json",
        "batch.py": "from nestsp.errors import X",
        "plan.py": "import numpy, nestsp.batch",
        "schedule.py": "from .plan import Plan",
        "planners/__init__.py": "from nestsp.planners.nsp import Nsp",
        "planners/nsp.py": "from nestsp.planners import packing",
        "planners/packing.py": "import safetensors.numpy, torchfree",
        "attention/ring.py": "import torch\nfrom nestsp.comm import groups\nfrom nestsp.schedule import Step",
        "comm/groups.py": "import torch",
        "train/step.py": "import transformers\nfrom nestsp.planners import nsp",
        "cli/main.py": "from nestsp import __version__\ndef train():\n    import nestsp.train.step\n",
    }
    assert find_violations(write_package(tmp_path, files)) == []


def test_a_loaded_torch_is_found(tmp_path: Path) -> None:
    root = write_package(tmp_path, {"plan.py": "__import__('tor' + 'ch')"})
    (tmp_path / "torch.py").touch()
    assert find_violations(root) == []
    assert torch_loaded_by(planning_modules(root), tmp_path) == ["torch"]


def test_a_changed_environment_is_found(tmp_path: Path) -> None:
    write_package(tmp_path, {"__init__.py": "import os\nos.environ['OMP_NUM_THREADS'] = '17'"})
    assert environment_changed_by("nestsp", tmp_path) == ["OMP_NUM_THREADS"]


def test_a_missing_export_is_found() -> None:
    class Exports:
        __all__ = ("here", "gone")
        here = 1

    assert missing_exports(Exports) == ["gone"]
