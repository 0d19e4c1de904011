"""Things with one home: process state, communication, optional packages, the determinism switch, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.rule import LIBRARY, Hit, Rule
from tests.architecture.sources import Source

KERNEL_PACKAGES = frozenset(
    {
        "triton",
        "transformer_engine",
        "mamba_ssm",
        "causal_conv1d",
        "apex",
        "fused_weight_gradient_mlp_cuda",
        "cudnn",
        "flash_attn",
    }
)

_EARLY_REFUSAL = "a bad command line is refused before torch is loaded"

# Imports inside functions, by file: which packages, and why not at the top of the file.
LATE_IMPORTS: dict[str, tuple[tuple[str, ...], str]] = {
    "pretrain_hybrid.py": (("megatron.training",), _EARLY_REFUSAL),
    "megatron/core/__init__.py": (("megatron.core",), "public names load on first use"),
    "megatron/core/tokenizers/gpt2_bpe.py": (("tokenizers",), "optional, by flag"),
    "megatron/core/tokenizers/huggingface.py": (("tokenizers",), "optional, by flag"),
    "megatron/core/tokenizers/sentencepiece.py": (("sentencepiece",), "optional, by flag"),
    "megatron/core/tokenizers/tiktoken.py": (("tiktoken",), "optional, by flag"),
    "megatron/determinism/__main__.py": (("megatron.determinism",), "each subcommand loads what it needs"),
    "megatron/training/__init__.py": (("megatron.training",), _EARLY_REFUSAL),
    "megatron/training/observe/machine.py": (("pynvml",), "optional, for facts about GPUs"),
    "megatron/training/observe/observers.py": (("megatron.training.observe",), "behind it: optional packages"),
    "tools/progress.py": (("rich",), "optional, used on a terminal only"),
}

DYNAMIC_IMPORTS = {
    "megatron/core/__init__.py": "public names load on first use",
    "megatron/core/ops/": "finds the variants of each op, and the optional packages behind them",
    "tools/docs/declared_ops.py": "loads the catalog once missing packages are stood in for",
}


def _imported(node: ast.AST) -> list[str]:
    """Dotted names an import statement may load; ``from a import b`` may load ``a.b``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _is_or_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _global(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "global: state belongs to an object that is passed"


def _broad_except(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(c is None or ast.unparse(c) in ("Exception", "BaseException") for c in caught)
        passed_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if broad and not passed_on:
            yield (
                node.lineno,
                "a broad except hides the error that mattered: name what can happen",
            )


def _environment(source: Source) -> Iterator[Hit]:
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        imported = any(name in {f"os.{n}" for n in names} for name in _imported(node))
        if attribute or imported:
            yield (
                node.lineno,
                "reads the environment: that is for megatron/training/setup/environment.py",
            )


def _torch_distributed(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        if attribute or any(_is_or_in(name, "torch.distributed") for name in _imported(node)):
            yield (
                node.lineno,
                "torch.distributed: take a group of core/process_groups, call its methods",
            )


_REDUCTIONS = frozenset(
    {"all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"}
)


def _backend_sum(source: Source) -> Iterator[Hit]:
    wrong = "leaves a sum to the backend, in an order nobody states: FloatSums adds floats, sum_integers integers"
    for node in ast.walk(source.tree):
        of_torch = isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("dist", "torch.distributed")
        if of_torch and node.attr in _REDUCTIONS:
            yield node.lineno, f"{node.attr} {wrong}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            for alias in node.names:
                if alias.name in _REDUCTIONS:
                    yield node.lineno, f"{alias.name} {wrong}"


def _functional_collective(source: Source) -> Iterator[Hit]:
    names = ("_functional_collectives", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
    for node in ast.walk(source.tree):
        named = isinstance(node, ast.Attribute) and node.attr in names
        if named or any(part in names for name in _imported(node) for part in name.split(".")):
            yield node.lineno, "a functional collective, whose sums the backend orders: take those of collectives.py"


def _kernel_packages(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        for name in _imported(node):
            if name.partition(".")[0] in KERNEL_PACKAGES:
                yield node.lineno, f"{name} outside megatron/core/ops: register a variant of the op instead"


def _missing_package(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = ast.unparse(node.type)
            if "ImportError" in caught or "ModuleNotFoundError" in caught:
                yield (
                    node.lineno,
                    "falls back where a package is missing: that is a missing variant",
                )


def _late_import(source: Source) -> Iterator[Hit]:
    packages, _ = LATE_IMPORTS.get(source.path, ((), ""))
    for function in ast.walk(source.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            for name in _imported(node):
                if not any(_is_or_in(name, package) for package in packages):
                    yield (
                        node.lineno,
                        f"imports {name} inside a function: move it to the top",
                    )


def _dynamic_import(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield node.lineno, "imports by a computed name, which no import check can see"


def _type_checking(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield (
                node.lineno,
                "an import for checkers only hides a cycle: move the shared type down",
            )


def _mode_question(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        attribute = isinstance(node, ast.Attribute) and node.attr == "deterministic_mode"
        by_name = isinstance(node, ast.Constant) and node.value == "deterministic_mode"
        if attribute or by_name:
            yield node.lineno, "asks about deterministic_mode: take the op from the table built at start-up"


def _facade(source: Source) -> Iterator[Hit]:
    for node in ast.walk(source.tree):
        if any(_is_or_in(name, "megatron.core.parallel_state") for name in _imported(node)):
            yield node.lineno, "core uses parallel_state, a front for users: pass the process groups in"


def _timed_or_atomic(source: Source) -> Iterator[Hit]:
    if source.name.startswith("fast"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and (node.attr == "autotune" or node.attr.startswith("atomic_")):
            yield (
                node.lineno,
                f"{node.attr} leaves the order to timing: for files fast*.py only",
            )


def _unannounced(source: Source) -> Iterator[Hit]:
    announced = {
        id(inner)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.With) and any(ast.unparse(item.context_expr) == "rerun()" for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "enable_grad" and id(node) not in announced:
            yield node.lineno, "a forward inside a backward: compute it inside rerun() (core/ops/rerun.py), for traces"


BOUNDARIES = (
    Rule(
        name="global",
        check=_global,
        where=("megatron/", "tools/", "tests/"),
        planted="def f():\n    global x\n",
    ),
    Rule(
        name="broad-except",
        check=_broad_except,
        where=(*LIBRARY, "tests/"),
        allowed={"tests/support/ranks.py": "whatever a rank raises is handed to the test"},
        planted="try:\n    f()\nexcept (ValueError, Exception):\n    pass\n",
    ),
    Rule(
        name="environment",
        check=_environment,
        allowed={"megatron/training/setup/environment.py": "the one home of the environment"},
        planted="import os\n\nx = os.environ['RANK']\n",
    ),
    Rule(
        name="torch-distributed",
        check=_torch_distributed,
        allowed={
            "megatron/core/process_groups/": "the one home of collectives",
            "megatron/core/dist_checkpointing/": "checkpoint I/O goes through torch.distributed.checkpoint",
            "megatron/training/setup/": "starts and ends the process group",
            "tools/bench/collectives.py": "times the backend's own collectives",
        },
        planted="from torch import distributed\n",
    ),
    Rule(
        name="backend-sum",
        check=_backend_sum,
        allowed={
            "megatron/core/process_groups/ordered_reduce.py": "the baseline that the cost of order is measured against",
            "megatron/core/process_groups/collectives.py": "integers, minimum and maximum, which have no order",
            "tools/bench/collectives.py": "the same baseline, in place",
        },
        planted="import torch.distributed as dist\n\n\ndef f(x):\n    dist.all_reduce(x)\n",
        planted_at="megatron/core/process_groups/planted.py",
    ),
    Rule(
        name="functional-collectives",
        check=_functional_collective,
        planted="from torch.distributed import _functional_collectives as fc\n",
        planted_at="megatron/core/process_groups/planted.py",
    ),
    Rule(
        name="kernel-packages",
        check=_kernel_packages,
        allowed={"megatron/core/ops/": "the home of kernels"},
        planted="import triton.language as tl\n",
    ),
    Rule(
        name="missing-package",
        check=_missing_package,
        allowed={"megatron/core/ops/": "a variant whose package is missing is not registered"},
        planted="try:\n    import rich\nexcept ImportError:\n    rich = None\n",
    ),
    Rule(name="late-import", check=_late_import, planted="def f():\n    from megatron.core import models\n"),
    Rule(
        name="dynamic-import",
        check=_dynamic_import,
        allowed=DYNAMIC_IMPORTS,
        planted="import importlib\n\nx = importlib.import_module('rich')\n",
    ),
    Rule(
        name="type-checking-import",
        check=_type_checking,
        planted="from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import rich\n",
    ),
    Rule(
        name="mode-question",
        check=_mode_question,
        allowed={
            "megatron/core/config/": "declares the field and checks it against others",
            "megatron/core/ops/registry.py": "chooses the variants of a run, once",
            "megatron/core/process_groups/create.py": "chooses the collectives of a run, once",
            "megatron/training/config/": "resolves and checks the configuration",
            "megatron/training/setup/pinned_environment.py": "says which variables the mode pins",
            "megatron/training/setup/determinism.py": "sets torch's switches, once",
        },
        planted="def f(config):\n    return config.deterministic_mode\n",
    ),
    Rule(
        name="facade",
        check=_facade,
        where=("megatron/core/",),
        allowed={"megatron/core/__init__.py": "hands the name to users"},
        planted="from megatron.core import parallel_state\n",
    ),
    Rule(
        name="timed-or-atomic",
        check=_timed_or_atomic,
        where=("megatron/core/ops/",),
        planted="import triton\n\nf = triton.autotune\n",
        planted_at="megatron/core/ops/planted/deterministic.py",
    ),
    Rule(
        name="rerun",
        check=_unannounced,
        where=("megatron/",),
        planted="def backward(ctx, grad):\n    with torch.enable_grad():\n        y = ctx.run()\n",
    ),
)
