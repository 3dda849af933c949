"""Imports in `spot_jax` go down only, and importing it has no side effects."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the bottom up; the longest prefix wins. A module imports lower floors and its own subpackage.
FLOORS = [
    "config state json_io",
    "models.layers models.attention noise reading commit rows",
    "models",
    "draft verify rules forward costs",
    "passes",
    "loop",
    "ahead",
    "decode orbax_io refusals family tokenizer_files hf_rope",
    "checkpoint family_rows safetensors_io samplers rule_io costs_io",
    "families",
    "hf_config",
    "hf_weights",
    "hf_write",
    "convert requests bundled drafter_io torch_io",
    "text generate measure drafter_convert ranks_io",
    "compare",
    "commands",
    "cli",
]
FLOOR = {f"spot_jax.{m}": floor for floor, names in enumerate(FLOORS) for m in names.split()}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "spot_jax").rglob("*.py"))
}


def floor_of(module: str) -> int:
    if module == "spot_jax":
        return len(FLOORS)
    prefix = module
    while prefix not in FLOOR:
        prefix = prefix.rpartition(".")[0]
        assert prefix, f"{module} has no floor; give it one in tests/test_floors.py"
    return FLOOR[prefix]


def imports_of(module: str) -> set[str]:
    """Modules that `module` imports anywhere in its text, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in FILES else str(node.module))
    return found


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_only(module):
    mine = floor_of(module)
    for other in imports_of(module):
        top = other.split(".")[0]
        assert top not in ("train", "tests", "tools", "configs"), f"{module} imports {other}"
        if top == "spot_jax" and other.split(".")[:2] != module.split(".")[:2]:
            assert floor_of(other) < mine, f"{module} imports {other}, which is not below it"


def test_import_has_no_side_effects():
    code = """
import sys, jax
import jax._src.xla_bridge as bridge
before = dict(jax.config.values)
import spot_jax
assert not bridge._backends, "a JAX backend was initialised"
assert jax.config.values == before, "a JAX setting was changed"
heavy = {"torch", "transformers"} & sys.modules.keys()
assert not heavy, f"imports {heavy}"
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_public_names():
    code = """
import sys, spot_jax
assert not {"jax", "flax", "numpy"} & sys.modules.keys(), "import spot_jax is not cheap"
from spot_jax import generate  # imports the submodule `decode`
for name in spot_jax.__all__:
    assert callable(getattr(spot_jax, name)), name
from spot_jax.decode import begin
assert spot_jax.decode.__name__ == "decode" and set(spot_jax.__all__) <= set(dir(spot_jax))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
