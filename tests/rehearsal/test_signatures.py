"""The stand-ins take what the real packages take: parameters by name and order, read from the wheels' own sources.

`make rehearsal` downloads the wheels into .rehearsal/; an installed package serves as well.
"""

import ast
import importlib.util
import inspect
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs" / "flash_attn"


def source_of(wheel: str, member: str) -> str:
    """Return the source of a module from a downloaded wheel, or from the installed package."""
    for path in sorted((ROOT / ".rehearsal").glob(f"{wheel}-*.whl"), reverse=True):
        return zipfile.ZipFile(path).read(member).decode()
    name = member.removesuffix(".py").replace("/", ".")
    package = importlib.util.find_spec(name.partition(".")[0])
    for folder in (package.submodule_search_locations or []) if package else []:
        if (file := Path(folder).parent / member).exists():
            return file.read_text(encoding="utf-8")
    pytest.skip(f"{wheel} is neither installed nor in .rehearsal: make rehearsal")


def parameters_of(source: str, function: str) -> list[str]:
    """Return the names of a function's parameters, in order."""
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == function]
    assert found, function
    arguments = found[0].args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def stub_parameters(file: Path) -> list[str]:
    return parameters_of(file.read_text(encoding="utf-8"), "flash_attn_varlen_func")


def test_flash_attn_4_has_the_parameters_that_are_passed():
    real = parameters_of(source_of("flash_attn_4", "flash_attn/cute/interface.py"), "flash_attn_varlen_func")
    assert real == stub_parameters(STUBS / "cute" / "__init__.py")


def test_ligers_fused_loss_has_the_parameters_that_are_passed():
    from trainer.model.liger import fused_cross_entropy

    module = "liger_kernel/transformers/functional.py"
    real = parameters_of(source_of("liger_kernel", module), "liger_fused_linear_cross_entropy")
    called = next(
        node
        for node in ast.walk(ast.parse(inspect.getsource(fused_cross_entropy)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "liger_fused_linear_cross_entropy"
    )
    assert len(called.args) == 3
    assert real[:3] == ["input", "weight", "target"]
    assert {keyword.arg for keyword in called.keywords} <= set(real[3:])


def test_ligers_fused_loss_still_counts_targets_on_the_host():
    source = source_of("liger_kernel", "liger_kernel/ops/fused_linear_cross_entropy.py")
    assert ".item()" in source  # once it is gone, docs and notes can promise no host sync with liger's loss too


def test_torchs_operator_has_the_parameters_that_are_passed():
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    names = list(inspect.signature(varlen.varlen_attn).parameters)
    assert names[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= set(names)


def test_the_stand_ins_are_not_on_the_path_of_the_tests():
    assert not any(str(STUBS.parent) in entry for entry in sys.path)
