"""`Loaded`: a model, its tokenizer, and the properties that an audit needs."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from assay.precision.errors import BadText
from assay.precision.loading.text import batches_of, parts_of

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
