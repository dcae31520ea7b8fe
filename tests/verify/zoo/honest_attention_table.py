"""Honest attention entries: each kernel with the options that it is examined under."""

from functools import partial

from .entry import Entry, family
from .honest_attention import attention_flash, attention_rows, attention_split

ALL = ("float32", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
HEADS = {"D": [1, 8, 33, 64, 128]}
MASKS = {"causal": ["none", "bottom_right", "top_left"]}
CAUSAL = {"causal": ["bottom_right", "top_left"]}
EVERYTHING = {
    **MASKS,
    "scale": [None, 0.25],
    "window": [None, (16, 0), (5, 7)],
    "softcap": [None, 30.0],
    "alibi": [False, True],
    "sinks": [False, True],
}
WINDOWS = {**MASKS, "window": [(0, 0), (16, 0), (5, 7)]}
LSE = {**MASKS, "return_lse": [True]}

rows_rounded = partial(attention_rows, round_probabilities=True)
flash_rounded = partial(attention_flash, round_probabilities=True)
split_rounded = partial(attention_split, round_probabilities=True)

ATTENTION: tuple[Entry, ...] = (
    *family("attention_rows", "attention", attention_rows, ALL, options=EVERYTHING, shapes=HEADS),
    *family("attention_rows_rounded", "attention", rows_rounded, HALF, options=MASKS, shapes=HEADS),
    *family("attention_rows_lse", "attention", attention_rows, ("float32",), options=LSE, shapes=HEADS),
    *family("attention_flash", "attention", attention_flash, ALL, options=MASKS, shapes=HEADS),
    *family("attention_flash_everything", "attention", attention_flash, ALL, options=EVERYTHING, shapes=HEADS),
    *family("attention_flash_rounded", "attention", flash_rounded, HALF, options=EVERYTHING, shapes=HEADS),
    *family("attention_flash_causal", "attention", attention_flash, ALL, options=CAUSAL, shapes=HEADS),
    *family("attention_flash_window", "attention", attention_flash, ALL, options=WINDOWS, shapes=HEADS),
    *family(
        "attention_flash_softcap", "attention", attention_flash, ALL, options={**CAUSAL, "softcap": [2.0]}, shapes=HEADS
    ),
    *family(
        "attention_flash_alibi", "attention", attention_flash, ALL, options={**MASKS, "alibi": [True]}, shapes=HEADS
    ),
    *family("attention_flash_sinks", "attention", attention_flash, ALL, options={"sinks": [True]}, shapes=HEADS),
    *family("attention_flash_lse", "attention", attention_flash, ALL, options=LSE, shapes=HEADS),
    *family("attention_split", "attention", attention_split, ALL, options=MASKS, shapes=HEADS),
    *family("attention_split_rounded", "attention", split_rounded, HALF, options=EVERYTHING, shapes=HEADS),
    *family("attention_split_lse", "attention", attention_split, ALL, options=LSE, shapes=HEADS),
)
