"""Join data sets into one: documents of the first input, then of the second, and so on.

    python tools/merge_datasets.py --input FOLDER --output-prefix corpus_text_document
    python tools/merge_datasets.py --input part1_text_document part2_text_document --output-prefix corpus_text_document

An input is the prefix of a .bin/.idx pair, or a folder, which stands for every pair in it by name. Exit codes: 0 done,
2 refused, 3 an input is damaged (named).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.errors import ConfigError, Problem
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, bin_path, idx_path
from tools.command_line import output_problems, run_tool, wrote


def prefixes_of(inputs: Sequence[str], output: str) -> list[str]:
    """Prefixes of all inputs in order; of a folder by name, without ``output`` itself.

    Raises:
        ConfigError: an input is neither a pair nor a folder, a folder holds half of a pair, an input is there twice or
            is the output, or there is none.
    """
    found: list[str] = []
    problems = []
    for given in inputs:
        # Training leaves a folder of indices beside a data set, under its name.
        if Path(given).is_dir() and not (bin_path(given).is_file() and idx_path(given).is_file()):
            stems = sorted({path.with_suffix("") for path in Path(given).iterdir() if path.suffix in (".bin", ".idx")})
            inside = [str(stem) for stem in stems if stem.resolve() != Path(output).resolve()]
            if not inside:
                problems.append(Problem(f"--input {given}", "a folder that holds .bin and .idx files", "--input"))
        else:
            inside = [given]
        for prefix in inside:
            missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
            if missing:
                problems.append(Problem(f"--input {given}", f"both files of a pair; no {missing[0]}", "--input"))
        found += inside
    if len({Path(prefix).resolve() for prefix in found}) < len(found):
        problems.append(Problem(f"--input {' '.join(inputs)}", "every data set once", "--input"))
    if Path(output).resolve() in {Path(prefix).resolve() for prefix in found}:
        problems.append(Problem(f"--output-prefix {output}", "a prefix that is no input", "--output-prefix"))
    problems += output_problems(output)
    if problems:
        raise ConfigError(problems)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="merge_datasets.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="prefixes or folders, in order")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin and P.idx")
    parser.add_argument("--multimodal", action="store_true", help="refused: only text is trained here")
    arguments = parser.parse_args(argv)
    if arguments.multimodal:
        raise ConfigError([Problem("--multimodal", "data sets of text", "leave it out")])
    output = arguments.output_prefix
    prefixes = prefixes_of(arguments.input, output)
    types = {prefix: IndexedDataset(prefix).dtype for prefix in prefixes}
    first = types[prefixes[0]]
    problems = [
        Problem(f"--input {prefix}, which holds {dtype.name} tokens", f"{first.name}, as {prefixes[0]}", "--input")
        for prefix, dtype in types.items()
        if dtype != first
    ]
    if problems:
        raise ConfigError(problems)
    with IndexedDatasetBuilder(output, first.type) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
            print(f"{prefix}: {len(IndexedDataset(prefix).document_indices) - 1} documents")
        replaced = builder.finalize()
    merged = IndexedDataset(output)
    print(wrote(output, replaced=replaced))
    print(f"{len(merged.document_indices) - 1} documents, {merged.num_tokens} tokens ({first.name})")
    return 0


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
