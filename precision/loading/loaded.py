"""`Loaded`: a model, its tokenizer, and the properties that an audit needs; texts as sequences of tokens."""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence

from assay.formats.errors import UnknownOption
from assay.precision.errors import BadText
from assay.runtime.files import read_text

_LARGEST = 2**30  # bytes of a text
Kind: TypeAlias = Literal["causal_lm", "encoder", "classifier", "module", "exported"]


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode.

    tokenizer: of transformers, or None. kind: the model's output: "causal_lm" and "classifier" return logits, "encoder"
    hidden states (or logits, with a masked-language-model head), "module" and "exported" anything. path: the directory
    or file that it was read from, None for a factory or an object. stored: the dtype of most weights in the files.
    vocabulary: the number of token ids of the embedding; positions: the maximum sequence length; None if unknown.
    """

    model: torch.nn.Module
    tokenizer: Any
    kind: Kind
    name: str
    path: Path | None
    stored: torch.dtype
    vocabulary: int | None = None
    positions: int | None = None

    def batches(self, text: str | Path, *, sequence: int = 256, **options: Any) -> list[dict[str, torch.Tensor]]:
        """Return `batches_of` the text with this model's tokenizer, checked against its vocabulary and maximum length.

        Raises `BadText` as `batches_of` does, and if there is no tokenizer, if the tokenizer doesn't fit the model, or
        if the model accepts no sequence of that length.
        """
        self._check(sequence)
        return self._known(batches_of(text, self.tokenizer, sequence=sequence, **options))

    def parts(
        self, text: str | Path, check: str | Path | None = None, *, sequence: int = 256, **options: Any
    ) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]] | None]:
        """Return `parts_of` the text: batches to choose on, and held-out ones. Raises as `batches`."""
        self._check(sequence)
        first, second = parts_of(text, self.tokenizer, check, sequence=sequence, **options)
        return self._known(first), None if second is None else self._known(second)

    def _check(self, sequence: int) -> None:
        if self.tokenizer is None:
            own = self.path is not None and self.path.is_dir()
            remedy = "put its tokenizer.json beside config.json" if own else "audit it in Python, with your own batches"
            raise BadText(f"{self.name} has no tokenizer, so a text can't be cut into tokens; {remedy}")
        if self.positions is not None and sequence > self.positions:
            raise BadText(f"{self.name} takes at most {self.positions} tokens, got sequence={sequence}; choose fewer")

    def _known(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        last = max(int(batch["input_ids"].max()) for batch in batches)
        if self.vocabulary is not None and last >= self.vocabulary:
            token = self.tokenizer.convert_ids_to_tokens(last)
            raise BadText(
                f"the tokenizer isn't {self.name}'s: it gives token {token!r} the id {last}, but the model has "
                f"{self.vocabulary} ids; put the model's own tokenizer beside config.json"
            )
        return batches


def commonest_dtype(weights: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the dtype of most values, given dtype and count of each tensor; float32 if there are none."""
    counts: Counter[torch.dtype] = Counter()
    for dtype, count in weights:
        counts[dtype] += count
    return counts.most_common(1)[0][0] if counts else torch.float32


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
    # Special tokens that the tokenizer adds before and after a text.
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = list(encoded["input_ids"]), list(encoded["special_tokens_mask"])
    first = special.index(0) if 0 in special else len(special)
    last = len(special) - special[::-1].index(0) if 0 in special else len(special)
    before, after = ids[:first], ids[last:]
    room = sequence - len(before) - len(after)
    if room < 1:
        raise UnknownOption(f"sequence={sequence} leaves no room beside {len(before) + len(after)} special tokens")
    texts = [line for line in content.splitlines() if line.strip()] if lines else [content]
    rows = [list(tokenizer(each, add_special_tokens=False, verbose=False)["input_ids"]) for each in texts]
    if lines:
        count = min(len(rows), sequences)
        rows = [rows[index * len(rows) // count][:room] for index in range(count)]
    else:  # disjoint, evenly spaced; a text shorter than two sequences gives one
        (tokens,) = rows
        count = max(min(sequences, len(tokens) // room), 1)
        starts = [index * (len(tokens) - room) // max(count - 1, 1) for index in range(count)]
        rows = [tokens[start : start + room] for start in starts]
    count = sum(len(row) for row in rows)
    if count < 2:
        raise BadText(f"{source} gives {count} token{'s' * (count != 1)}; expected at least 2, so give a longer text")
    return [[*before, *row, *after] for row in rows if row], tokenizer.pad_token_id or 0


def _read(text: str | Path) -> tuple[str, str]:
    """Return a name for the text in messages, and the text."""
    source = "the text"
    if isinstance(text, Path):
        source = str(text)
        text = read_text(text, BadText, "give a file of UTF-8 text", most=_LARGEST)
    elif os.path.isfile(text):
        raise BadText(f"expected a text or a pathlib.Path, got the name of a file; give Path({text!r})")
    if not text.strip():
        raise BadText(f"{source} is empty; give a text like those that the model will see")
    return source, text


def _batched(rows: list[list[int]], batch: int, padding: int) -> list[dict[str, torch.Tensor]]:
    results = []
    for start in range(0, len(rows), batch):
        some = [torch.tensor(row) for row in rows[start : start + batch]]
        mask = pad_sequence([torch.ones_like(row) for row in some], batch_first=True)
        results.append(
            {"input_ids": pad_sequence(some, batch_first=True, padding_value=padding), "attention_mask": mask}
        )
    return results
