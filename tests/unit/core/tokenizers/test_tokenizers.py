"""Tokenizers: round trips, the ids that mean something, and choices that are refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from megatron.core.config.errors import ConfigError, DamagedInputError
from megatron.core.tokenizers.base import Tokenizer, loss_pad_id
from megatron.core.tokenizers.build import TokenizerChoice, build_tokenizer, tokenizer_problems
from megatron.core.tokenizers.byte import ByteTokenizer
from megatron.core.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.core.tokenizers.null import NullTokenizer


def chosen(kind: str | None, **options: Any) -> Tokenizer:
    return build_tokenizer(TokenizerChoice(kind=kind, **options))


TEXTS = ["", "plain", "caf\u00e9 \u4e2d\u6587 \U0001f600", "a\r\nb\0\t", "\x7f\x80\uffff"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text: str):
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.pad]) == text


def test_byte_layout():
    tokenizer = chosen("ByteTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 256, 257)
    assert tokenizer.detokenize([0x61, 0xFF]) == "a\ufffd"
    assert chosen("ByteTokenizer", vocab_size=512).vocab_size == 512
    assert ByteTokenizer.vocab_size == 258
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.tokenize("\ud800")


def test_null():
    tokenizer = chosen("NullTokenizer", vocab_size=512)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (512, 511, -1)
    assert tokenizer.tokenize(" 1 2\n511 ") == [1, 2, 511]
    assert tokenizer.detokenize([1, 2, 511]) == "1 2"
    for text in ("512", "-1", "x", "1.0"):
        with pytest.raises(ValueError):
            tokenizer.tokenize(text)
    assert chosen("NullTokenizer", vocab_size=512, eod_id=3, pad_id=4).eod == 3


def test_pad_that_is_also_another_token_masks_nothing():
    assert loss_pad_id(NullTokenizer(10, eod_id=3, pad_id=4), allow_ambiguous=False) == 4
    assert loss_pad_id(NullTokenizer(10, eod_id=4, pad_id=4), allow_ambiguous=False) == -1
    assert loss_pad_id(NullTokenizer(10, eod_id=4, pad_id=4), allow_ambiguous=True) == 4
    assert loss_pad_id(NullTokenizer(10), allow_ambiguous=False) == -1


def _write(folder: Path, special: list[str], settings: dict | None = None) -> Path:
    words = {word: i for i, word in enumerate(["[UNK]", "hello", "world", "again"])}
    made = LibraryTokenizer(WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens([AddedToken(token) for token in special])
    made.post_processor = TemplateProcessing(single="hello $A", special_tokens=[("hello", 1)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "tokenizer.json"


def test_hugging_face_file_and_folder(tmp_path: Path):
    path = _write(tmp_path / "t", ["<|endoftext|>", "<pad>", "<mask>"])
    for model in (path, path.parent):
        tokenizer = chosen("HuggingFaceTokenizer", model=str(model))
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (7, 4, 5)
        assert tokenizer.special_ids == {4, 6}
        assert tokenizer.tokenize("world hello new") == [2, 1, 0]
        assert tokenizer.detokenize([2, 1, 4]) == "world hello"


def test_hugging_face_settings_name_the_tokens(tmp_path: Path):
    settings = {"eos_token": {"content": "<b>"}, "pad_token": "<b>"}
    tokenizer = HuggingFaceTokenizer(str(_write(tmp_path / "t", ["</s>", "<b>"], settings)))
    assert (tokenizer.eod, tokenizer.pad) == (5, 5)
    assert loss_pad_id(tokenizer, allow_ambiguous=False) == -1
    path = _write(tmp_path / "u", ["</s>"], {"eos_token": "<b>"})
    with pytest.raises(DamagedInputError, match="eos_token is '<b>'"):
        HuggingFaceTokenizer(str(path))


@pytest.mark.parametrize("special", [[], ["</s>", "<|endoftext|>"]])
def test_hugging_face_without_one_end_of_document_is_refused(tmp_path: Path, special: list[str]):
    with pytest.raises(ConfigError, match="eos_token"):
        HuggingFaceTokenizer(str(_write(tmp_path / "t", special)))


def test_hugging_face_vocabulary_size(tmp_path: Path):
    path = str(_write(tmp_path / "t", ["</s>"]))
    assert chosen("HuggingFaceTokenizer", model=path, vocab_size=100).vocab_size == 100
    with pytest.raises(ConfigError, match="at least the 5 ids"):
        chosen("HuggingFaceTokenizer", model=path, vocab_size=4)


def test_hugging_face_damage_is_named(tmp_path: Path):
    path = _write(tmp_path / "t", ["</s>"])
    whole = path.read_text()
    for content in (whole[:100], "[1]", '{"a": 1}', '{"model": {"type": "none"}}'):
        path.write_text(content)
        with pytest.raises(DamagedInputError, match=r"tokenizer\.json"):
            HuggingFaceTokenizer(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(DamagedInputError, match="not UTF-8 at byte 0"):
        HuggingFaceTokenizer(str(path))
    with pytest.raises(ConfigError, match="there is no file"):
        HuggingFaceTokenizer(str(tmp_path))


def test_hugging_face_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = _write(tmp_path / "t", ["</s>"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        HuggingFaceTokenizer(str(path))


def test_identifiers_tell_tokenizers_apart(tmp_path: Path):
    made = [
        ByteTokenizer(),
        NullTokenizer(5),
        NullTokenizer(6),
        HuggingFaceTokenizer(str(_write(tmp_path / "t", ["</s>"]))),
        HuggingFaceTokenizer(str(_write(tmp_path / "u", ["</s>", "x"]))),
    ]
    identifiers = [json.dumps(tokenizer.identifiers()) for tokenizer in made]
    assert len(set(identifiers)) == len(made)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (None, {}, "no --tokenizer-type"),
        ("GPT2BPETokenizer", {}, "--vocab-file"),
        ("GPT2BPETokenizer", {"vocab_file": "x"}, "--merge-file"),
        ("TikTokenizer", {}, "--tokenizer-model"),
        ("TikTokenizer", {"model": "x", "pattern": "v3"}, "v1 or v2"),
        ("TikTokenizer", {"model": "x", "num_special": 6}, "at least the 7 that have names"),
        ("TikTokenizer", {"model": "x", "special_tokens": ("<unk>",)}, "</s>"),
        ("Llama2Tokenizer", {}, "a SentencePiece .model file"),
        ("ByteTokenizer", {"pattern": "v1"}, "TikTokenizer, whose setting it is"),
        ("SFTTokenizer", {}, "pre-training"),
        ("ByteTokeniser", {}, "--tokenizer-type ByteTokenizer$"),
        ("NullTokenizer", {}, "--vocab-size"),
        ("NullTokenizer", {"vocab_size": 0}, "at least 1"),
        ("NullTokenizer", {"vocab_size": 9, "eod_id": 9}, "--null-tokenizer-eod-id"),
        ("NullTokenizer", {"vocab_size": 9, "pad_id": -2}, "--null-tokenizer-pad-id"),
        ("NullTokenizer", {"vocab_size": 9, "model": "x"}, "--tokenizer-model"),
        ("HuggingFaceTokenizer", {}, "--tokenizer-model"),
        ("HuggingFaceTokenizer", {"model": "x", "eod_id": 1}, "NullTokenizer, whose setting it is"),
        ("ByteTokenizer", {"vocab_size": 257}, "at least 258"),
    ],
)
def test_refused(kind, options, message):
    assert any(message.rstrip("$") in str(p) for p in tokenizer_problems(TokenizerChoice(kind=kind, **options)))
    with pytest.raises(ConfigError, match=message):
        chosen(kind, **options)
