"""Turn text into token files: one .bin/.idx pair for each JSON key.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus --tokenizer-type ByteTokenizer \
        --append-eod

A .jsonl or .json file holds one JSON object a line; any other file is plain text and one document. The output is the
same for any number of workers. It is written aside and takes the place of files of that name at the end, which is
said; a run that ends earlier leaves those as they were. Exit codes: 0 done, 1 a file cannot be
written, 2 refused, 3 input damaged (named, with its line).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.config.errors import ConfigError, DamagedInputError, Problem
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, token_dtype
from megatron.core.tokenizers.base import Tokenizer
from megatron.training.config.data import TokenizerConfig
from megatron.training.data.provider import tokenizer_from
from tools.command_line import add_flags, config_from, output_problems, run_tool, wrote
from tools.progress import Progress

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_KEY = "text"
MOST_TOKENS = int(np.iinfo(np.int32).max)
"""Tokens of one sequence that the .idx file can say."""
# Documents handed to a worker at once: enough to pay for the trip, few enough to share the work.
_BATCH_DOCUMENTS = 64
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RawDocument:
    """Bytes of one document as they are in a file, and where they are. ``line`` is ``None`` for plain text."""

    path: str
    line: int | None
    content: bytes

    @property
    def place(self) -> str:
        """File and line, for an error."""
        return self.path if self.line is None else f"{self.path}: line {self.line}"


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """From a raw document to its token ids under each key; goes to the worker processes as a whole."""

    tokenizer_config: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool

    def encode(self, tokenizer: Tokenizer, document: RawDocument) -> dict[str, NDArray]:
        """Token ids of each key's text; a text without tokens gets no end-of-document token either.

        Raises:
            DamagedInputError: not UTF-8, not a JSON object with the keys, or a text the tokenizer cannot say.
        """
        encoded = {}
        for key, text in _texts(document, self.keys).items():
            try:
                ids = tokenizer.tokenize(text)
            except ValueError as error:
                raise DamagedInputError(f"{document.place}: {error}") from error
            if ids and self.append_eod:
                ids.append(tokenizer.eod)
            if len(ids) > MOST_TOKENS:
                raise DamagedInputError(
                    f"{document.place}: {len(ids)} tokens, the index holds {MOST_TOKENS} in a document: split it"
                )
            encoded[key] = np.array(ids, token_dtype(tokenizer.vocab_size))
        return encoded


@functools.cache
def tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a configuration, loaded once in each process."""
    return tokenizer_from(config)


def encode_batch(encoder: Encoder, batch: Sequence[RawDocument]) -> list[dict[str, NDArray]]:
    """Token ids of each document, in order."""
    tokenizer = tokenizer_of(encoder.tokenizer_config)
    return [encoder.encode(tokenizer, document) for document in batch]


def read_documents(paths: Sequence[str]) -> Iterator[RawDocument]:
    """Every document of the inputs, in order. Blank lines of JSON files are no documents."""
    for path in paths:
        if not path.endswith(JSON_SUFFIXES):
            yield RawDocument(path=path, line=None, content=Path(path).read_bytes())
            continue
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield RawDocument(path=path, line=number, content=line)


def encode_all(
    documents: Iterator[RawDocument], encoder: Encoder, workers: int
) -> Iterator[tuple[int, list[dict[str, NDArray]]]]:
    """Input bytes and token ids of one batch of documents after the other, in input order.

    With several workers a bounded number of batches is under way, so memory does not grow with the input.
    """
    batches = _batched(documents)
    if workers == 1:
        for batch in batches:
            yield _size(batch), encode_batch(encoder, batch)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        under_way: deque[tuple[int, Future[list[dict[str, NDArray]]]]] = deque()
        for batch in itertools.islice(batches, 4 * workers):
            under_way.append((_size(batch), pool.submit(encode_batch, encoder, batch)))
        try:
            while under_way:
                size, future = under_way.popleft()
                encoded = future.result()
                for batch in itertools.islice(batches, 1):
                    under_way.append((_size(batch), pool.submit(encode_batch, encoder, batch)))
                yield size, encoded
        finally:
            pool.shutdown(cancel_futures=True)


def parser() -> argparse.ArgumentParser:
    """The command line; names are those of Megatron's tool."""
    made = argparse.ArgumentParser(
        prog="preprocess_data.py", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    made.add_argument("--input", nargs="+", required=True, metavar="FILE", help="jsonl or plain text files")
    made.add_argument("--output-prefix", required=True, metavar="P", help="writes P_KEY_document.bin and .idx")
    made.add_argument("--json-keys", nargs="+", default=[TEXT_KEY], metavar="KEY", help="keys of the texts in the JSON")
    made.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    made.add_argument("--workers", type=int, default=1, metavar="N", help="processes that tokenise")
    made.add_argument("--partitions", type=int, default=1, metavar="N", help="no effect: --workers share any input")
    made.add_argument("--keep-sequential-samples", action="store_true", help="no effect: the order is always kept")
    made.add_argument("--split-sentences", action="store_true", help="refused: a document is one sequence here")
    made.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines")
    add_flags(made, TokenizerConfig)
    return made


def main(argv: Sequence[str]) -> int:
    """Run the tool; returns the exit code."""
    arguments = parser().parse_args(argv)
    encoder = Encoder(
        tokenizer_config=config_from(TokenizerConfig, arguments),
        keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
    )
    problems = _problems(arguments) + encoder.tokenizer_config.problems()
    if problems:
        raise ConfigError(problems)
    tokenizer = tokenizer_of(encoder.tokenizer_config)
    for flag in without_effect(arguments):
        print(f"warning: {flag}", file=sys.stderr)
    prefixes = {key: f"{arguments.output_prefix}_{key}_document" for key in encoder.keys}
    total_bytes = sum(Path(path).stat().st_size for path in arguments.input)
    counts = {"documents": 0, "tokens": 0}
    start = time.monotonic()
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        builders = {key: stack.enter_context(IndexedDatasetBuilder(prefixes[key], dtype)) for key in encoder.keys}
        progress = stack.enter_context(Progress(total_bytes, arguments.log_interval))
        for size, batch in encode_all(read_documents(arguments.input), encoder, arguments.workers):
            for document in batch:
                for key, ids in document.items():
                    builders[key].add_document(ids, [len(ids)] if len(ids) else [])
                    counts["tokens"] += len(ids)
            counts["documents"] += len(batch)
            progress.advance(size, counts["documents"])
        if not counts["tokens"]:
            raise DamagedInputError(f"{', '.join(arguments.input[:5])}: no text in it, so there is nothing to write")
        replaced = {key: builder.finalize() for key, builder in builders.items()}
    seconds = time.monotonic() - start
    for key, prefix in prefixes.items():
        print(wrote(prefix, replaced=replaced[key]))
    print(f"{counts['documents']} documents, {counts['tokens']} tokens ({np.dtype(dtype).name}), {seconds:.1f} s")
    return 0


def without_effect(arguments: argparse.Namespace) -> list[str]:
    """Megatron's flags that were given and change nothing, each with its reason."""
    notes = []
    if arguments.partitions != 1:
        notes.append("--partitions has no effect: any number of --workers shares one input and writes one output")
    if arguments.keep_sequential_samples:
        notes.append("--keep-sequential-samples has no effect: documents are always written in the order of the input")
    return notes


def _problems(arguments: argparse.Namespace) -> list[Problem]:
    found = [Problem(f"--input {p}", "a file that exists", "--input") for p in arguments.input if not Path(p).is_file()]
    if arguments.split_sentences:
        needed = (
            "documents as they are: where a sentence ends is only asked by models that are trained on sentence pairs"
        )
        found.append(Problem("--split-sentences", needed, "leave it out"))
    for flag in ("workers", "log_interval", "partitions"):
        if getattr(arguments, flag) < 1:
            name = "--" + flag.replace("_", "-")
            found.append(Problem(f"{name} {getattr(arguments, flag)}", "at least 1", name))
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        found.append(Problem(f"--json-keys {' '.join(arguments.json_keys)}", "each key once", "--json-keys"))
    plain = next((p for p in arguments.input if not p.endswith(JSON_SUFFIXES)), None)
    if plain is not None and arguments.json_keys != [TEXT_KEY]:
        keys = " ".join(arguments.json_keys)
        found.append(Problem(f"--json-keys {keys} with the plain text file {plain}", "JSON files only", "--input"))
    return found + output_problems(arguments.output_prefix)


def _texts(document: RawDocument, keys: tuple[str, ...]) -> dict[str, str]:
    try:
        # A byte order mark says how a file is encoded; it belongs to no text.
        text = document.content.decode("utf-8-sig" if document.line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = document.line or document.content.count(b"\n", 0, error.start) + 1
        column = error.start - (document.content.rfind(b"\n", 0, error.start) + 1) + 1
        byte = f"byte {column} of the line (0x{document.content[error.start]:02x})"
        raise DamagedInputError(f"{document.path}: line {line}: {byte} is not UTF-8") from error
    if document.line is None:
        return {TEXT_KEY: text}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        # Also for numbers of too many digits and brackets nested too deep.
        raise DamagedInputError(f"{document.place}: not JSON: {error}") from error
    for key in keys:
        if not isinstance(content, dict) or not isinstance(content.get(key), str):
            raise DamagedInputError(f'{document.place}: needs an object whose "{key}" is a text (--json-keys)')
        try:
            content[key].encode("utf-8")
        except UnicodeEncodeError as error:
            raise DamagedInputError(f'{document.place}: "{key}" holds half of a surrogate pair: no text') from error
    return {key: content[key] for key in keys}


def _batched(documents: Iterator[RawDocument]) -> Iterator[list[RawDocument]]:
    batch: list[RawDocument] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH_DOCUMENTS or _size(batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _size(batch: Sequence[RawDocument]) -> int:
    return sum(len(document.content) for document in batch)


if __name__ == "__main__":
    sys.exit(run_tool(main, sys.argv[1:]))
