"""Who may import whom: the table of layers, held for every module under src/dtorch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC, EXAMPLES = ROOT / "src" / "dtorch", ROOT / "examples"

FACADE = "dtorch"
BELOW_SESSION = {"core", "sharding", "transport", "communication", "observability", "worker", "cluster", "controller", "tensor"}
CONSUMER = {FACADE, "nn", "parallel"}

# Folder or module directly under src/dtorch -> what of dtorch it may import besides itself; None is everything.
LAYERS: dict[str, set[str] | None] = {
    "core": set(),
    "sharding": {"core"},
    "transport": {"core"},
    "communication": {"core"},
    "observability": {"core"},
    "worker": {"core", "transport", "communication", "observability"},
    "cluster": {"core", "transport", "observability"},
    "controller": {"core", "transport", "cluster", "observability"},
    "tensor": {"core", "sharding"},
    "session": BELOW_SESSION,
    "process": BELOW_SESSION - {"tensor", "controller", "sharding"},
    "parallel": {"core", "sharding", "tensor"},
    "nn": {"parallel"},
    "training": CONSUMER,
    "rl": CONSUMER,
    "apps": CONSUMER,
    "demo": CONSUMER,
    "testing": None,
    "cli": {FACADE, "demo", "cluster"},
    "__main__": {"cli"},
    "__init__": None,
}

# Package outside dtorch -> the only layers that may import it. A layer that is not named in a row is free.
ONLY_IN = {"torch.distributed": {"communication"}}
NEVER_IN = {"torch": {"controller"}}


def layer_of(path: Path, root: Path) -> str:
    """Name of the layer a file belongs to: its folder, or its own name directly under the root."""
    first = path.relative_to(root).parts[0]
    return first.removesuffix(".py")


def imported_modules(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """Absolute dotted names one statement imports; ``from a import b`` counts as ``a.b``.

    Args:
        node: any syntax node; one that imports nothing gives an empty list.
        package: dotted parts of the package the file belongs to, against which relative imports resolve.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else ()
        base += tuple(node.module.split(".")) if node.module else ()
        return [".".join((*base, alias.name)) for alias in node.names]
    return []


def _uses_attribute(node: ast.AST, dotted: str) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == dotted


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _target(module: str) -> str | None:
    """Layer a dotted import lands in: a row of the table, the façade, or None outside dtorch."""
    if not _inside(module, "dtorch"):
        return None
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else FACADE


def _layer_faults(layer: str, modules: list[str]) -> Iterator[str]:
    allowed = LAYERS[layer]
    for module in modules:
        target = _target(module)
        if target not in (None, layer) and allowed is not None and target not in allowed:
            yield f"{layer} may not import {module}"


def _outside_faults(layer: str, node: ast.AST, modules: list[str]) -> Iterator[str]:
    for package, layers in ONLY_IN.items():
        if layer not in layers and (any(_inside(m, package) for m in modules) or _uses_attribute(node, package)):
            yield f"only {sorted(layers)} may use {package}"
    for package, layers in NEVER_IN.items():
        if layer in layers and any(_inside(m, package) for m in modules):
            yield f"{layer} may not import {package}"


def _functions(tree: ast.AST) -> Iterator[ast.AST]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _hidden_imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    for function in _functions(tree):
        for node in ast.walk(function):
            hidden = [m for m in imported_modules(node, package) if _inside(m, "dtorch")]
            if hidden:
                yield node.lineno, f"{', '.join(hidden)} is imported inside a function: mend the cycle instead"


def _file_faults(path: Path, root: Path) -> set[tuple[int, str]]:
    layer = layer_of(path, root)
    if layer not in LAYERS:
        return {(1, f"{layer!r} has no row in the table of layers")}
    package = ("dtorch", *path.relative_to(root).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set(_hidden_imports(tree, package))
    for node in ast.walk(tree):
        modules = imported_modules(node, package)
        faults = [*_layer_faults(layer, modules), *_outside_faults(layer, node, modules)]
        found.update((getattr(node, "lineno", 1), fault) for fault in faults)
    return found


def violations(root: Path) -> list[str]:
    """Every breach of the table under ``root``, as ``file:line: what``; empty when the house is in order."""
    files = sorted(root.rglob("*.py"))
    return [f"{f.relative_to(root)}:{line}: {what}" for f in files for line, what in sorted(_file_faults(f, root))]


def test_every_module_keeps_to_its_layer() -> None:
    assert violations(SRC) == []


def test_examples_use_public_names() -> None:
    for file in sorted(EXAMPLES.rglob("*.py")):
        package = ("examples", *file.relative_to(EXAMPLES).parent.parts)
        statements = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        targets = {_target(module) for node in statements for module in imported_modules(node, package)}
        assert targets <= {None, FACADE, "nn", "demo"}, file


def test_the_layers_have_no_cycle() -> None:
    tables = {name: (allowed or set()) - {FACADE} for name, allowed in LAYERS.items()}
    while tables:
        leaves = {name for name, allowed in tables.items() if not allowed & tables.keys()}
        assert leaves, f"cycle among {sorted(tables)}"
        tables = {name: allowed for name, allowed in tables.items() if name not in leaves}


BREACHES = [
    ("core/a.py", "from ..sharding import planner", "core may not import dtorch.sharding.planner"),
    ("core/a.py", "import dtorch", "core may not import dtorch"),
    ("sharding/rules/a.py", "from ...tensor.dispatch import run", "sharding may not import dtorch.tensor.dispatch.run"),
    ("tensor/a.py", "from dtorch import session", "tensor may not import dtorch.session"),
    ("training/a.py", "from dtorch.core.mesh import DeviceMesh", "training may not import dtorch.core.mesh.DeviceMesh"),
    ("controller/a.py", "from torch import Tensor", "controller may not import torch"),
    ("worker/a.py", "import torch.distributed as dist", "only ['communication'] may use torch.distributed"),
    ("worker/a.py", "from torch import distributed", "only ['communication'] may use torch.distributed"),
    ("worker/a.py", "x = torch.distributed.is_initialized()", "only ['communication'] may use torch.distributed"),
    ("tensor/a.py", "def f():\n    from ..core import mesh", "is imported inside a function"),
    ("tensor/a.py", "from ..testing.opdb import run", "tensor may not import dtorch.testing.opdb.run"),
    ("demo/a.py", "from dtorch.testing import opdb", "demo may not import dtorch.testing.opdb"),
    ("attic/a.py", "", "'attic' has no row"),
]


@pytest.mark.parametrize(("name", "source", "message"), BREACHES)
def test_a_breach_is_seen(tmp_path: Path, name: str, source: str, message: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1 and message in found[0], found


KEPT = [
    ("core/a.py", "from .errors import MeshError\nimport torch"),
    ("sharding/rules/a.py", "from ..call import Call\nfrom ...core.mesh import DeviceMesh"),
    ("communication/a.py", "import torch.distributed as dist"),
    ("apps/a.py", "import dtorch\nfrom dtorch import Shard, nn\nfrom dtorch.parallel import parallelize"),
    ("parallel/a.py", "def f():\n    import transformers"),
    ("testing/opdb/a.py", "from ... import Tensor, explain\nfrom ...core.mesh import coordinates"),
    ("session.py", "from .worker.executor import Executor\nfrom .tensor import Tensor"),
]


@pytest.mark.parametrize(("name", "source"), KEPT)
def test_what_the_table_allows_passes(tmp_path: Path, name: str, source: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
    assert violations(tmp_path) == []
