"""Times of checkpoints on GPUs beside plain file I/O of the same bytes: save, save in the background, load.

    python -m tools.bench.checkpoint_io --gpus 2 --dir /big/disk/folder --json io.json

Trains a hybrid model of about 1.2 billion parameters in bf16 for a few steps in every layout (DP2; TP2 with sequence
parallelism), saves twice, loads that in a second launch and saves twice in the background; then as many processes
write and read files of the same sizes, synced, with nothing else to do. Nothing is deleted in between, which some disks
take as long for as for writing. Whatever is read comes from the disk: files are dropped from the page cache before. The
second save counts: the first one also allocates the host buffers. Prints one row per layout; the last columns are
shares of the plain rate, and the stall of a save in the background as a share of a synchronous one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from megatron.determinism.leg_log import read_failure
from tools.bench.ended import run_to_end
from tools.command_line import run_tool

ROOT = Path(__file__).resolve().parents[2]
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
LAYOUTS = {"DP2": "--expert-model-parallel-size 1", "TP2": f"{TP2} --expert-model-parallel-size 1"}
RECIPE = """
    --hybrid-layer-pattern MEM*EM --hidden-size 2688 --seq-length 1024 --max-position-embeddings 1024
    --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128
    --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8
    --num-experts 32 --moe-router-topk 6 --moe-ffn-hidden-size 1856 --moe-shared-expert-intermediate-size 3712
    --moe-router-score-function sigmoid --moe-router-dtype fp32 --moe-router-load-balancing-type seq_aux_loss
    --moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --normalization RMSNorm
    --squared-relu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type none
    --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer --deterministic-mode
    --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --lr-decay-style constant --lr-decay-iters 10
    --eval-iters 0 --log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 65535
"""
SAVED = re.compile(r"successfully saved checkpoint from iteration\s+(\d+) .* in ([0-9.]+) s")
STALLED = re.compile(r"training went on after (\d+) ms \((\d+) ms for the save before\)")
LOADED = re.compile(r"loading and proving the checkpoint took ([0-9.]+) s")
KEPT = "--override-opt-param-scheduler"
CHUNK = 1 << 24


def train(gpus: int, layout: str, folder: Path, *flags: str) -> str:
    """One launch; returns what it printed.

    Raises:
        RuntimeError: it failed; with the trainer's own words.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    command += ["pretrain_hybrid.py", *RECIPE.split(), *LAYOUTS[layout].split(), "--save", str(folder), *flags]
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        done = run_to_end(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        failure = read_failure(log, done.returncode)
        raise RuntimeError("\n".join((f"{layout} {' '.join(flags)}: exit {failure.code}", *failure.words)))
    return log.read_text("utf-8")


def write_plain(path: Path, size: int) -> None:
    """Write and sync ``size`` bytes that do not compress."""
    block = os.urandom(CHUNK)
    with path.open("wb") as file:
        for start in range(0, size, CHUNK):
            file.write(block[: min(CHUNK, size - start)])
        file.flush()
        os.fsync(file.fileno())


def drop_cached(paths: Iterable[Path]) -> None:
    """Have the next reader of synced files read them from the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_plain(path: Path, size: int) -> None:
    """Read it into one buffer."""
    del size
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def plain_seconds(work: Callable[[Path, int], None], paths: list[Path], sizes: list[int]) -> float:
    """Time of one process per file, all at once, the start of the processes not counted."""
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(len(paths) + 1)

    def run(path: Path, size: int) -> None:
        ready.wait()
        work(path, size)

    processes = [context.Process(target=run, args=pair) for pair in zip(paths, sizes, strict=True)]
    for process in processes:
        process.start()
    ready.wait()
    start = time.monotonic()
    for process in processes:
        process.join()
    return time.monotonic() - start


def measure(gpus: int, layout: str, root: Path) -> dict[str, object]:
    """One row; folders are removed as soon as they are not needed."""
    folder = root / layout
    keeping = ("--save-interval", "2", KEPT)
    sync = train(gpus, layout, folder, "--train-iters", "4", *keeping)
    saves_s = [float(seconds) for _, seconds in SAVED.findall(sync)]
    save_s = saves_s[-1]
    newest = folder / "iter_0000004"
    files = sorted(newest.glob("*.distcp"))
    total = sum(path.stat().st_size for path in files)
    drop_cached(newest.iterdir())
    background = train(gpus, layout, folder, "--load", str(folder), "--train-iters", "8", *keeping, "--async-save")
    load_s = float(LOADED.findall(background)[-1])
    stall_s = [int(ms) / 1000 for ms, _ in STALLED.findall(background)][-1]
    waited_s = [int(ms) / 1000 for _, ms in STALLED.findall(background)][-1]
    shutil.rmtree(folder)
    by_rank = [total // gpus] * gpus
    paths = [root / f"plain_{rank}" for rank in range(gpus)]
    plain_write_s = plain_seconds(write_plain, paths, by_rank)
    drop_cached(paths)
    plain_read_s = plain_seconds(read_plain, paths, by_rank)
    for path in paths:
        path.unlink()
    return {
        "layout": layout,
        "GB": round(total / 1e9, 2),
        "files": len(files),
        "saves s": saves_s,
        "save s": save_s,
        "plain write s": round(plain_write_s, 2),
        "save / plain": round(plain_write_s / save_s, 2),
        "load s": load_s,
        "plain read s": round(plain_read_s, 2),
        "load / plain": round(plain_read_s / load_s, 2),
        "stall s": round(stall_s - waited_s, 3),
        "stall / save": round((stall_s - waited_s) / save_s, 3),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk that is measured; 60 GB free")
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    rows = []
    for layout in options.layout or LAYOUTS:
        rows.append(measure(options.gpus, layout, options.dir))
        if len(rows) == 1:
            print("  ".join(rows[0]), flush=True)
        print("  ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
