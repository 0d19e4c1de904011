"""On a GPU: products keep their bits once CUBLAS_WORKSPACE_CONFIG is gone, in new threads and on new streams too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = """
import os, threading, time
import torch
from megatron.training.setup.cublas_workspace import NAME, read_by_every_product, settle_workspace

SHAPES = ((8192, 2688, 5152), (8192, 1856, 2688), (96, 7, 131072), (4096, 2688, 32), (64, 131072, 64))

def digest(x):
    words = x.flatten().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).long()
    return int((words * torch.arange(1, 2 * words.numel(), 2, device="cuda")).sum())

def digests():
    torch.manual_seed(1)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for m, k, n in SHAPES:
            a, b = (torch.randn(*of, device="cuda").to(dtype) for of in ((m, k), (k, n)))
            found += [digest(torch.mm(a, b)), digest(torch.nn.functional.linear(a, b.t().contiguous()))]
    a, b = (torch.randn(*of, device="cuda").bfloat16() for of in ((8192, 512), (8192, 768)))
    out = torch.zeros(512, 768, device="cuda")
    torch.addmm(out, a.t(), b, out_dtype=torch.float32, out=out)
    return [*found, digest(out)]

def in_threads():
    # What comes first in a thread makes a handle of cuBLAS, and on a stream a workspace, of its own.
    found = []
    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(digests())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]

def host_us():
    a = torch.ones(64, 64, device="cuda")
    torch.mm(a, a)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(100):
        torch.mm(a, a)
    return (time.perf_counter() - began) * 1e4
"""
SETTLED = f"""
{PRODUCTS}
torch.use_deterministic_algorithms(True)
before, us = digests(), host_us()
assert before == digests()
assert settle_workspace(torch.device("cuda", 0)) is read_by_every_product()
assert (NAME in os.environ) is not read_by_every_product()
assert digests() == before
assert in_threads() == before
print(f"host time of a small product: {{us:.0f}} us, then {{host_us():.0f}} us")
"""
SETTLED_FIRST = f"""
{PRODUCTS}
torch.use_deterministic_algorithms(True)
settle_workspace(torch.device("cuda", 0))
print(*digests())
"""
KEPT = f"""
{PRODUCTS}
torch.use_deterministic_algorithms(True)
print(*digests())
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)


def test_bits_stay_and_the_host_is_faster() -> None:
    done = _run(SETTLED)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def test_bits_are_those_of_a_process_that_keeps_it() -> None:
    kept, settled = _run(KEPT), _run(SETTLED_FIRST)
    assert kept.returncode == settled.returncode == 0, kept.stderr + settled.stderr
    assert kept.stdout == settled.stdout
