"""Train a small model in two layouts, each launched twice and once more interrupted and resumed; compare the bits."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.determinism.leg_log import read_failure
from megatron.training.observe.curves import draw_curves, read_metrics
from megatron.training.setup.closed_pipe import outlasting_readers

ROOT = Path(__file__).resolve().parent.parent
TEXT_CHARACTERS = 8_000_000
LEAST_TEXT = 20_000
DOCUMENTS = 100
RANKS = 4
TRAIN_ITERS = 24
STOP_AT = 12

MODEL = """
    --hybrid-layer-pattern {pattern} --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --kv-channels 16
    --mamba-num-heads 8 --mamba-head-dim 32 --mamba-state-dim 32 --mamba-num-groups 2
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --normalization RMSNorm --disable-bias-linear --squared-relu --untie-embeddings-and-output-weights
    --position-embedding-type none --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.02
    --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 8
    --train-iters {iters} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 5
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --seed 1234
    --tokenizer-type ByteTokenizer --split 98,2,0 --eval-interval 12 --eval-iters 1 --log-interval 6
    --use-distributed-optimizer --deterministic-mode
"""


@dataclass(frozen=True)
class Layout:
    """One way of spreading the model over the ranks; one that ``resumes`` is also stopped and resumed."""

    name: str
    pattern: str
    flags: str
    resumes: bool = False


LAYOUTS = (
    Layout(
        "TP2-EP2-DP2",
        "ME*E-/*E",
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
    Layout(
        "PP2-EP2-DP2",
        "ME*|E-/*E",
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
        resumes=True,
    ),
)


def refuse(words: str) -> NoReturn:
    """End with one line of explanation and exit code 2."""
    print(f"error: {words}", file=sys.stderr)
    raise SystemExit(2)


def own_text(files: list[str]) -> list[str]:
    """What the files hold, cut into ``DOCUMENTS`` documents or more, so that there are some to validate on. A file that
    cannot be read as text, and too little text, are refused."""
    texts = []
    for name in files:
        try:
            texts.append(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            refuse(f"--text {name}: {error.strerror}")
        except UnicodeDecodeError as error:
            refuse(f"--text {name}: not UTF-8 text (byte {error.start}: {error.reason})")
    total = sum(map(len, texts))
    if total < LEAST_TEXT:
        refuse(f"--text {' '.join(files)}: {total} characters in all, and training needs {LEAST_TEXT} or more")
    size = total // DOCUMENTS
    return [text[start : start + size] for text in texts for start in range(0, len(text), size)]


def run(command: list[str], log: Path) -> None:
    """Run a command with its output in ``log``; on failure say why and stop."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    with log.open("w", encoding="utf-8") as sink:
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=sink, stderr=subprocess.STDOUT).returncode
    if code:
        failure = read_failure(log, code)
        print("failed", *failure.words, sep="\n")
        print(f"\nFAILED (exit {failure.code}): {' '.join(command[:6])} ...; whole output in {log}")
        raise SystemExit(1)


def launch(layout: Layout, leg: Path, data: Path, cache: Path, stop_at: int | None = None) -> Path:
    """One training run in fresh processes, with its files in ``leg``; returns ``leg``.

    With ``stop_at`` it ends after that iteration, with a checkpoint, and other processes go on from there.
    """
    leg.mkdir(parents=True)
    flags = MODEL.format(pattern=layout.pattern, iters=TRAIN_ITERS).split() + layout.flags.split()
    flags += ["--data-path", str(data), "--data-cache-path", str(cache)]
    flags += ["--run-dir", str(leg), "--fingerprint-dir", str(leg / "fingerprint")]
    start = time.monotonic()
    words = "" if stop_at is None else f", stopped at {stop_at} and resumed"
    print(f"  {layout.name}, {leg.name}{words}: ", end="", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*torchrun, "pretrain_hybrid.py", *flags]
    if stop_at is not None:
        folder = str(leg / "checkpoints")
        command += ["--save", folder, "--save-interval", str(TRAIN_ITERS)]
        run([*command, "--exit-interval", str(stop_at)], leg / "log_before.txt")
        command += ["--load", folder, "--exit-on-missing-checkpoint"]
    run(command, leg / "log.txt")
    train, _ = read_metrics(leg / "metrics.jsonl")
    first, last = train[0]["losses"]["lm loss"], train[-1]["losses"]["lm loss"]
    print(f"{len(train)} steps, loss {first:.4f} -> {last:.4f}, {time.monotonic() - start:.0f} s")
    return leg


def compare(left: Path, right: Path) -> tuple[bool, str]:
    """Whether two fingerprint folders are identical, and the command's words."""
    command = [sys.executable, "-m", "megatron.determinism", "compare", str(left), str(right)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode == 0, (done.stdout or done.stderr).strip().splitlines()[0]


@outlasting_readers()
def main(argv: Sequence[str]) -> int:
    """Run everything; 0 only if all launches of every layout are bitwise identical and the model learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="train on these UTF-8 files instead")
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder for the run folder")
    arguments = parser.parse_args(argv)
    documents = own_text(arguments.text) if arguments.text else []
    folder = arguments.out.absolute() / time.strftime("quickstart-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        refuse(f"--out {arguments.out}: {folder} cannot be made: {error.strerror}")
    print(f"Run folder: {folder}\nTokenising text")
    text = folder / "text.jsonl"
    if documents:
        text.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents), encoding="utf-8")
    else:
        collect = [sys.executable, "tools/python_text.py", str(text), "--characters", str(TEXT_CHARACTERS)]
        run(collect, folder / "collect.log")
    tool = [sys.executable, "tools/preprocess_data.py", "--input", str(text)]
    tool += ["--output-prefix", str(folder / "data"), "--tokenizer-type", "ByteTokenizer", "--append-eod"]
    run([*tool, "--workers", "2"], folder / "tokenise.log")
    print(f"Training on {RANKS} ranks, {TRAIN_ITERS} steps a launch")
    good, curves = True, {}
    for layout in LAYOUTS:
        data, cache = folder / "data_text_document", folder / "cache"
        legs = [launch(layout, folder / layout.name / f"launch{number}", data, cache) for number in (1, 2)]
        if layout.resumes:
            legs.append(launch(layout, folder / layout.name / "launch3", data, cache, STOP_AT))
        results = [compare(legs[0] / "fingerprint", leg / "fingerprint") for leg in legs[1:]]
        same = all(identical for identical, _ in results)
        train, _ = read_metrics(legs[0] / "metrics.jsonl")
        learned = train[-1]["losses"]["lm loss"] < 0.8 * train[0]["losses"]["lm loss"]
        good = good and same and learned
        for number, (_, words) in enumerate(results, 2):
            print(f"  {layout.name}, launch 1 and launch {number}: {words}")
        if not learned:
            print(f"  {layout.name}: the loss did not fall")
        curves[layout.name] = [leg / "metrics.jsonl" for leg in legs]
    picture = folder / "curves.png"
    draw_curves(curves, picture, "Independent launches of each layout")
    print(f"Picture: {picture}")
    print(
        "VERDICT: every launch of each layout is bitwise identical, the resumed one too"
        if good
        else "VERDICT: NOT identical, see above"
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
