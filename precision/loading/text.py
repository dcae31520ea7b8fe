"""Texts as token sequences: equal pieces spread evenly over a text, or its lines, padded."""

import os
from pathlib import Path
from typing import Any

import torch

from assay.formats.errors import UnknownOption
from assay.precision.errors import BadText


def batches_of(
    text: str | Path,
    tokenizer: Any,
    *,
    sequence: int = 256,
    sequences: int = 64,
    batch: int = 8,
    lines: bool = False,
) -> list[dict[str, torch.Tensor]]:
    """Return the text as batches of sequences: ``input_ids`` and ``attention_mask``, int64 [<= batch, <= sequence].

    text: the text itself, or the path of a UTF-8 file. tokenizer: of transformers; its special tokens are added around
    every sequence. The sequences don't overlap and are spread evenly over the text; a shorter text gives fewer of them,
    a text shorter than one sequence gives one of the text's length. With ``lines`` every line that isn't blank is a
    sequence, truncated to ``sequence`` tokens and padded at its end; if there are more than ``sequences`` lines, evenly
    spaced ones are used: for encoders.

    Raises `BadText` if the text can't be read or gives fewer than two tokens, `UnknownOption` for a length below 2 or a
    count below 1.
    """
    rows, padding = _rows(text, tokenizer, sequence, sequences, batch, lines)
    return _batched(rows, batch, padding)


def parts_of(
    text: str | Path,
    tokenizer: Any,
    check: str | Path | None = None,
    *,
    sequence: int = 256,
    sequences: int = 64,
    batch: int = 8,
    lines: bool = False,
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]] | None]:
    """Return the text as batches to choose on, as from `batches_of`, and held-out ones to judge the choice on.

    check: another text, from which a third as many sequences are taken. None: a quarter of the text's own sequences is
    held out, at least eight but at most half, evenly spread over the text; with a single sequence the second part is
    None.
    """
    rows, padding = _rows(text, tokenizer, sequence, sequences, batch, lines)
    if check is not None:
        others, _ = _rows(check, tokenizer, sequence, max(sequences // 3, 1), batch, lines)
        return _batched(rows, batch, padding), _batched(others, batch, padding)
    count = min(max(-(-len(rows) // 4), 8), len(rows) // 2)
    if not count:
        return _batched(rows, batch, padding), None
    held = {(2 * index + 1) * len(rows) // (2 * count) for index in range(count)}
    parts = ([row for position, row in enumerate(rows) if (position in held) is taken] for taken in (False, True))
    return tuple(_batched(part, batch, padding) for part in parts)  # type: ignore[return-value]


def _rows(
    text: str | Path, tokenizer: Any, sequence: int, sequences: int, batch: int, lines: bool
) -> tuple[list[list[int]], int]:
    """Return token sequences, and the token that pads them."""
    for name, value, least in (("sequence", sequence, 2), ("sequences", sequences, 1), ("batch", batch, 1)):
        if value < least:
            raise UnknownOption(f"{name}={value}; expected at least {least}")
    source, content = _read(text)
    before, after = _around(tokenizer)
    room = sequence - len(before) - len(after)
    if room < 1:
        raise UnknownOption(f"sequence={sequence} leaves no room beside {len(before) + len(after)} special tokens")
    if lines:
        rows = [_tokens(tokenizer, line)[:room] for line in content.splitlines() if line.strip()]
        rows = [rows[index * len(rows) // sequences] for index in range(sequences)] if len(rows) > sequences else rows
    else:
        rows = _cuts(_tokens(tokenizer, content), room, sequences)
    count = sum(len(row) for row in rows)
    if count < 2:
        raise BadText(f"{source} gives {count} token{'s' * (count != 1)}; expected at least 2, so give a longer text")
    whole = [[*before, *row, *after] for row in rows if row]
    return whole, tokenizer.pad_token_id or 0


def _batched(rows: list[list[int]], batch: int, padding: int) -> list[dict[str, torch.Tensor]]:
    return [_stacked(rows[start : start + batch], padding) for start in range(0, len(rows), batch)]


def _read(text: str | Path) -> tuple[str, str]:
    """Return a name for the text in messages, and the text."""
    source = "the text"
    if isinstance(text, Path):
        source = str(text)
        try:
            text = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise BadText(
                f"{source} isn't UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}); convert it first"
            ) from None
        except OSError as error:
            raise BadText(f"{source} can't be read ({error.strerror}); give a file of UTF-8 text") from None
    elif os.path.isfile(text):
        raise BadText(f"expected a text or a pathlib.Path, got the name of a file; give Path({text!r})")
    if not text.strip():
        raise BadText(f"{source} is empty; give a text like those that the model will see")
    return source, text


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens that the tokenizer adds before and after a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    first = special.index(0) if 0 in special else len(special)
    last = len(special) - special[::-1].index(0) if 0 in special else len(special)
    return ids[:first], ids[last:]


def _cuts(tokens: list[int], length: int, most: int) -> list[list[int]]:
    """Return at most ``most`` disjoint, evenly spaced sequences of ``length`` tokens, or one shorter sequence."""
    count = min(most, len(tokens) // length)
    if count < 2:
        return [tokens[:length]]
    free = len(tokens) - length
    starts = [index * free // (count - 1) for index in range(count)]
    return [tokens[start : start + length] for start in starts]


def _stacked(rows: list[list[int]], padding: int) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [padding] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
    }
