"""The layer picture: an import goes down or stays within its row, and the pure rows need neither torch nor Thunder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import thunder_fusionfix

PACKAGE = "thunder_fusionfix"
ROOT = Path(thunder_fusionfix.__file__).parent

# Lowest first. A new module belongs into one row: the lowest that is above all that it imports, whatever it imports lazily too.
ROWS = {
    "words": "__init__ errors model config document garbage",
    "facts": "effects layout folding padding losses infer index_map alias liveness repeated store unparse text syntax paste canonical mincut devices variants model_names",
    "decide": "lift normal_form pins segments matmul_copies attention_workspace simulate facts schedule verify match diff parse apply joint step report results",
    "trace": "_thunder read cotangents undefined edit edit_joint share take_addmm splitter execute products",
    "passes": "passes.__init__ passes.own_cotangents passes.expand_zero_cotangents passes.ignore_cut_rows passes.unfuse_layouts passes.split_regions passes.reorder passes.fold_matmuls"
    " passes.pad_matmuls passes.cudnn_attention widen_losses"
    " passes.claim_layouts passes.recompute_cheap",
    "run": "pipeline joint_pipeline capture models sources explain page views",
    "entry": "transform executor plugin",
    "use": "measure predict bench overview targets doctor tools_cli cli demo __main__",
}
PURE = ("words", "facts", "decide")
IMPURE = {"torch", "thunder", "transformers", "nvfuser_direct"}

ROW_OF = {module: number for number, modules in enumerate(ROWS.values()) for module in modules.split()}
PURE_MODULES = [module for row in PURE for module in ROWS[row].split()]


def modules():
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path):
    """All that a file imports, at the top or inside of functions: our modules without the package's name, others as they are."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole.removeprefix(f"{PACKAGE}.") in ROW_OF else node.module


def ours(names):
    for name in names:
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            short = name.removeprefix(PACKAGE).lstrip(".") or "__init__"
            yield f"{short}.__init__" if (ROOT / short / "__init__.py").exists() else short


def test_every_module_has_one_row():
    """The picture is complete: a module that is in no row has no rules."""
    assert sorted(ROW_OF) == sorted(modules())
    assert len(ROW_OF) == sum(len(row.split()) for row in ROWS.values())


@pytest.mark.parametrize("module", sorted(ROW_OF))
def test_imports_go_down(module):
    """No module imports one of a higher row, not even inside of a function, and no pass imports another pass."""
    for other in ours(imports(modules()[module])):
        assert ROW_OF[other] <= ROW_OF[module], f"{module} imports {other}, which is above it"
        if module.startswith("passes.") and module != "passes.__init__":
            assert not other.startswith("passes.") or other == module, f"pass {module} imports pass {other}"


@pytest.mark.parametrize("module", PURE_MODULES)
def test_pure_modules_import_nothing_heavy(module):
    """Rows 0-2 name neither torch nor Thunder, so that they run on a Graph saved anywhere."""
    heavy = {name.split(".")[0] for name in imports(modules()[module])} & IMPURE
    assert not heavy


def loaded_with(names):
    code = f"import sys, {', '.join(names)}; print(sorted({IMPURE} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_pure_modules_load_without_torch():
    """Importing all of them leaves torch and Thunder unloaded."""
    assert loaded_with([f"{PACKAGE}.{module}" for module in PURE_MODULES if module != "__init__"]) == "[]"


def test_the_test_of_loading_can_fail():
    """A module that is not pure is seen."""
    assert "'torch'" in loaded_with([f"{PACKAGE}.models"])
