"""Texts as batches of tokens."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from assay.precision.loading import batches_of, load
from assay.runtime.errors import AssayError
from tests.precision.tiny_models import TEXT, edit_json, edit_weights, text_refusal


def test_a_text_is_cut_into_equal_disjoint_sequences_over_its_whole_length() -> None:
    tokenizer = load("stdlib-llama").tokenizer
    batches = batches_of(TEXT, tokenizer, sequence=32, sequences=11, batch=4)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 32), (4, 32), (3, 32)]
    rows = torch.cat([batch["input_ids"] for batch in batches]).tolist()
    assert all(bool(batch["attention_mask"].all()) for batch in batches)
    starts = [TEXT.index(bytes(row).decode()) for row in rows]
    assert (starts[0], starts[-1]) == (0, len(TEXT) - 32)
    gaps = [after - before for before, after in pairwise(starts)]
    assert min(gaps) >= 32
    assert max(gaps) - min(gaps) <= 1


def test_a_bundled_tokenizer_gives_each_byte_its_value() -> None:
    text = "\x00\tdéjà vu, 日本語 Ā\r\n\n"
    tokenizer = load("stdlib-mixtral").tokenizer
    (batch,) = batches_of(text, tokenizer)
    assert bytes(batch["input_ids"][0].tolist()) == text.encode()
    assert tokenizer.decode(batch["input_ids"][0]) == text


def test_a_short_text_is_used_as_it_is() -> None:
    loaded = load("stdlib-llama")
    assert [batch["input_ids"].tolist() for batch in loaded.batches("ab")] == [[[97, 98]]]
    assert [batch["input_ids"].shape for batch in loaded.batches(TEXT[:300])] == [(1, 256)]
    assert "gives 1 token;" in text_refusal(loaded, "a")


def test_lines_are_padded_and_masked() -> None:
    (batch,) = batches_of("one\n\nthree\n", load("stdlib-llama").tokenizer, sequence=4, lines=True)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert bytes(batch["input_ids"][1].tolist()) == b"thre"


def test_special_tokens_stand_around_every_sequence(stored: Callable[[str], Path]) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load(stored("bert")).tokenizer
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A ?", special_tokens=[("!", ord("!")), ("?", ord("?"))]
    )
    (batch,) = batches_of("abcdefgh", tokenizer, sequence=5)
    assert [bytes(row) for row in batch["input_ids"].tolist()] == [b"!abc?", b"!fgh?"]


def test_a_text_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    loaded = load("stdlib-llama")
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"abc\xff")
    assert "the text is empty" in text_refusal(loaded, "")
    assert f"{empty} is empty" in text_refusal(loaded, empty)
    assert "(byte 0xff at 3)" in text_refusal(loaded, binary)
    assert f"{tmp_path} can't be read" in text_refusal(loaded, tmp_path)
    assert "No such file" in text_refusal(loaded, tmp_path / "none.txt")
    assert "give Path(" in text_refusal(loaded, str(binary))
    assert "at most 256 tokens, got sequence=512" in text_refusal(loaded, TEXT, sequence=512)
    with pytest.raises(AssayError, match="sequence=1; expected at least 2"):
        loaded.batches(TEXT, sequence=1)


def test_another_models_tokenizer_is_refused(llama: Path) -> None:
    edit_json(llama / "config.json", vocab_size=100)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    edit_weights(llama, lambda weights: weights.update({name: weights[name][:100].clone() for name in names}))
    loaded = load(llama)
    assert loaded.batches("123")
    assert "gives token 'z' the id 122, but the model has 100 ids" in text_refusal(loaded, "xyz")
