"""SentencePiece, tiktoken JSON and GPT-2 BPE: ids, what ends documents, and damaged or unfitting files."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.core.tokenizers.base import Tokenizer
from megatron.core.tokenizers.build import SENTENCEPIECE_TYPES, TOKENIZER_TYPES, TokenizerChoice, build_tokenizer
from megatron.core.tokenizers.files import vocabulary_size
from megatron.core.tokenizers.gpt2_bpe import GPT2BPETokenizer
from megatron.core.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.core.tokenizers.tiktoken import PATTERNS, TikTokenizer

NO_FILES = ("ByteTokenizer", "NullTokenizer")
TEXT = "the cat sat on the mat; caf\u00e9 \u4e2d\u6587 12345\r\n  \tthe end"


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model that has all bytes to fall back on."""
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the end of the cat"] * 20),
        model_writer=written,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=3,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "m.model"
    path.write_bytes(written.getvalue())
    return path


def tiktoken_file(folder: Path, tokens: list[bytes]) -> Path:
    every = [bytes([i]) for i in range(256)] + tokens
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode("utf-8", "replace")}
        for i, t in enumerate(every)
    ]
    path = folder / "tiktoken.vocab.json"
    path.write_text(json.dumps(entries))
    return path


def gpt2_files(folder: Path) -> tuple[Path, Path]:
    tokens = ["t", "h", "e", "\u0120", "th", "the", "\u0120the", "<|endoftext|>"]
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    merges.write_text("#version: 0.2\nt h\nth e\n\u0120 the\n")
    return vocabulary, merges


def tiktoken_of(path: Path, **options: Any) -> TikTokenizer:
    return TikTokenizer(str(path), **{"vocab_size": 7 + 256 + 3, "num_special": 7, **options})


def test_sentencepiece_ids_are_the_librarys(model_file: Path) -> None:
    tokenizer = SentencePieceTokenizer(str(model_file))
    library = SentencePieceProcessor(model_file=str(model_file))
    assert tokenizer.tokenize(TEXT) == library.encode(TEXT)
    assert (tokenizer.eod, tokenizer.pad) == (library.eos_id(), 3)
    assert tokenizer.special_ids == {library.bos_id(), library.eos_id()}
    assert tokenizer.vocab_size == library.get_piece_size()
    assert tokenizer.detokenize([*tokenizer.tokenize("the cat"), tokenizer.eod]) == "the cat"
    assert SentencePieceTokenizer(str(model_file), 1000).vocab_size == 1000


def test_sentencepiece_refusals(model_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least the"):
        SentencePieceTokenizer(str(model_file), 10)
    with pytest.raises(ConfigError, match="there is no file"):
        SentencePieceTokenizer(str(tmp_path / "none.model"))
    (tmp_path / "bad.model").write_bytes(model_file.read_bytes()[:50])
    with pytest.raises(DamagedInputError, match=r"bad\.model: not a SentencePiece model"):
        SentencePieceTokenizer(str(tmp_path / "bad.model"))
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a b"] * 9), model_writer=written, vocab_size=5, eos_id=-1, minloglevel=2
    )
    (tmp_path / "endless.model").write_bytes(written.getvalue())
    with pytest.raises(ConfigError, match="end-of-sentence piece"):
        SentencePieceTokenizer(str(tmp_path / "endless.model"))


def test_tiktoken_ids(tmp_path: Path) -> None:
    """Special tokens, then the bytes, then the merges, shifted."""
    tokenizer = tiktoken_of(tiktoken_file(tmp_path, [b"th", b"the", b"\xc3\xa9"]))
    assert tokenizer.tokenize("the t\u00e9") == [7 + 257, 7 + 32, 7 + 116, 7 + 258]
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (2, 4, 266)
    assert tokenizer.special_ids == {0, 1, 2, 3, 5, 6}
    assert tokenizer.detokenize([*tokenizer.tokenize(TEXT), tokenizer.eod, tokenizer.pad]) == TEXT
    assert tokenizer.tokenize("the</s>") == [7 + 257, 2]
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.tokenize("a\ud800b")


def test_tiktoken_keeps_the_first_entries_and_names_special_tokens(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path, [b"th", b"the", b"end"])
    fewer = tiktoken_of(path, vocab_size=9 + 256 + 2, num_special=9)
    assert fewer.tokenize("end the<SPECIAL_8>") == [9 + 101, 9 + 110, 9 + 100, 9 + 32, 9 + 257, 8]
    names = ("<pad>", "<unk>", "<s>", "</s>", "<mask>", "<cls>", "<sep>", "<tool>")
    named = tiktoken_of(path, vocab_size=9 + 256, num_special=9, special_tokens=names)
    assert (named.eod, named.pad, named.tokenize("<tool>")) == (3, 0, [7])


@pytest.mark.parametrize(("pattern", "ids"), [("v1", [33, 10, 10, 47]), ("v2", [33, 10, 256])])
def test_tiktoken_patterns_cut_differently(tmp_path: Path, pattern: str, ids: list[int]) -> None:
    """A token that crosses a cut is never made: v2 keeps a slash with the line break before it, v1 cuts between."""
    assert set(PATTERNS) == {"v1", "v2"}
    tokenizer = tiktoken_of(tiktoken_file(tmp_path, [b"\n/"]), pattern=pattern, vocab_size=7 + 257)
    assert tokenizer.tokenize("!\n\n/") == [7 + i for i in ids]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not JSON"),
        ("{}", "needs a list"),
        ('[{"rank": 0}]', "entry 0 needs a rank"),
        ('[{"rank": 0, "token_bytes": "?"}]', "entry 0 needs a rank"),
        ('[{"rank": 1, "token_bytes": "AA=="}]', "out of order"),
        ('[{"rank": 0, "token_bytes": "AQ=="}]', "out of order"),
    ],
)
def test_tiktoken_damage_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DamagedInputError, match=message):
        tiktoken_of(tmp_path / "t.json")


def test_tiktoken_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path, [b"th"])
    with pytest.raises(ConfigError, match="--vocab-size 264"):
        TikTokenizer(str(path), num_special=7)
    with pytest.raises(ConfigError, match="7 special tokens and 256 bytes"):
        tiktoken_of(path, vocab_size=200)
    twice = json.loads(path.read_text())
    twice.append({**twice[256], "rank": 257})
    path.write_text(json.dumps(twice))
    with pytest.raises(DamagedInputError, match="twice"):
        tiktoken_of(path, vocab_size=264)


def test_gpt2(tmp_path: Path) -> None:
    vocabulary, merges = gpt2_files(tmp_path)
    tokenizer = GPT2BPETokenizer(str(vocabulary), str(merges))
    assert tokenizer.tokenize("the the<|endoftext|>h") == [5, 6, 7, 1]
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (7, -1, 8)
    assert tokenizer.detokenize([5, 6, 7]) == "the the"
    merges.write_text("t h\nth x\n")
    with pytest.raises(DamagedInputError, match="makes 'thx'"):
        GPT2BPETokenizer(str(vocabulary), str(merges))
    merges.write_text("t h\nthe\n")
    with pytest.raises(DamagedInputError, match="line 2 is not two tokens"):
        GPT2BPETokenizer(str(vocabulary), str(merges))
    vocabulary.write_text('{"a": 0}')
    with pytest.raises(ConfigError, match="endoftext"):
        GPT2BPETokenizer(str(vocabulary), str(merges))


def test_vocabulary_may_be_larger_but_not_smaller_than_the_files(tmp_path: Path) -> None:
    assert (vocabulary_size(8, None, tmp_path), vocabulary_size(8, 8, tmp_path), vocabulary_size(8, 9, tmp_path)) == (
        8,
        8,
        9,
    )
    with pytest.raises(ConfigError, match="at least the 8 ids"):
        vocabulary_size(8, 7, tmp_path)


def options(kind: str, model_file: Path, folder: Path) -> dict[str, Any]:
    if kind in SENTENCEPIECE_TYPES:
        return {"model": str(model_file)}
    if kind == "TikTokenizer":
        return {"model": str(tiktoken_file(folder, [])), "vocab_size": 263, "num_special": 7}
    if kind == "GPT2BPETokenizer":
        vocabulary, merges = gpt2_files(folder)
        return {"vocab_file": str(vocabulary), "merge_file": str(merges)}
    return {"NullTokenizer": {"vocab_size": 9}}.get(kind, {})


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZER_TYPES if kind != "HuggingFaceTokenizer"])
def test_every_type_can_be_chosen_and_names_its_file(kind: str, model_file: Path, tmp_path: Path) -> None:
    made = build_tokenizer(TokenizerChoice(kind=kind, **options(kind, model_file, tmp_path)))
    assert isinstance(made, Tokenizer)
    assert type(made).__name__ == (kind if kind not in SENTENCEPIECE_TYPES else "SentencePieceTokenizer")
    assert 0 <= made.eod < made.vocab_size
    assert made.identifiers()["class"].endswith(type(made).__name__)
    assert set(options(kind, model_file, tmp_path).values()) & set(made.identifiers().values()) or kind in NO_FILES


@pytest.mark.parametrize(
    ("kind", "package"),
    [("Llama2Tokenizer", "sentencepiece"), ("TikTokenizer", "tiktoken"), ("GPT2BPETokenizer", "tokenizers")],
)
def test_missing_library_is_named(
    kind: str, package: str, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = TokenizerChoice(kind=kind, **options(kind, model_file, tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"--tokenizer-type {kind}.*pip install {package}"):
        build_tokenizer(choice)
