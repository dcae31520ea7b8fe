"""llama.cpp itself on a CPU, out of the wheel xllamacpp: the logits that it computes of a GGUF file."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from assay.precision.errors import BadModel
from assay.runtime.lazy import optional

_ADDRESS = ctypes.c_void_p
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, _ADDRESS)(lambda *_: None)


class _Params(ctypes.Structure):
    """Parameters of a model or a context, larger than any version's: their defaults are all that is needed."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


class _Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32)] + [
        (name, _ADDRESS) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


class LlamaCpp(torch.nn.Module):
    """A GGUF file as llama.cpp runs it on a CPU, each sequence of tokens alone, its caches in float16.

    Called as a causal model of transformers is. Raises BadModel for a file that llama.cpp can't load, NotInstalled.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        _function("llama_log_set", None, type(_SILENT), _ADDRESS)(_SILENT, None)
        self._model = _function("llama_model_load_from_file", _ADDRESS, ctypes.c_char_p, _Params)(
            str(path).encode(), _function("llama_model_default_params", _Params)()
        )
        if not self._model:
            raise BadModel(f"llama.cpp can't load {path}: write it anew")
        vocabulary = _function("llama_model_get_vocab", _ADDRESS, _ADDRESS)(self._model)
        self._words = int(_function("llama_vocab_n_tokens", ctypes.c_int32, _ADDRESS)(vocabulary))

    def __del__(self) -> None:
        if self.__dict__.get("_model"):
            _function("llama_model_free", None, _ADDRESS)(self._model)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any) -> Any:
        """``logits`` (float32 [B, T, V]) of tokens [B, T]; zeros where the mask, [B, T], has zeros."""
        valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, self._words)
        for row, ids, kept in zip(logits, input_ids.cpu(), valid.cpu().bool(), strict=True):
            row[kept] = self._sequence(ids[kept].tolist())
        return SimpleNamespace(logits=logits.to(input_ids.device))

    def _sequence(self, ids: list[int]) -> torch.Tensor:
        """Logits [T, V] of one sequence."""
        settings = _function("llama_context_default_params", _Params)()
        # The first of its fields are sizes: of the context, and of what is computed at once.
        sizes = (ctypes.c_uint32 * 3)(len(ids), len(ids), len(ids))
        ctypes.memmove(ctypes.byref(settings), sizes, ctypes.sizeof(sizes))
        context = _function("llama_init_from_model", _ADDRESS, _ADDRESS, _Params)(self._model, settings)
        if not context:
            raise BadModel(f"llama.cpp has no context of {len(ids)} tokens for the model: give shorter sequences")
        tokens = _function("llama_batch_init", _Batch, *[ctypes.c_int32] * 3)(len(ids), 0, 1)
        try:
            for index, token in enumerate(ids):
                ctypes.cast(tokens.token, ctypes.POINTER(ctypes.c_int32))[index] = token
                ctypes.cast(tokens.pos, ctypes.POINTER(ctypes.c_int32))[index] = index
                ctypes.cast(tokens.n_seq_id, ctypes.POINTER(ctypes.c_int32))[index] = 1
                ctypes.cast(tokens.seq_id, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))[index][0] = 0
                ctypes.cast(tokens.logits, ctypes.POINTER(ctypes.c_int8))[index] = 1
            tokens.n_tokens = len(ids)
            if _function("llama_decode", ctypes.c_int32, _ADDRESS, _Batch)(context, tokens):
                raise BadModel(f"llama.cpp computes nothing for {len(ids)} tokens: give shorter sequences")
            start = _function("llama_get_logits", ctypes.POINTER(ctypes.c_float), _ADDRESS)(context)
            values = bytearray(ctypes.string_at(start, len(ids) * self._words * 4))
            return torch.frombuffer(values, dtype=torch.float32).view(len(ids), self._words)
        finally:
            _function("llama_batch_free", None, _Batch)(tokens)
            _function("llama_free", None, _ADDRESS)(context)


@cache
def _library() -> Any:
    return ctypes.CDLL(optional("xllamacpp.xllamacpp", purpose="llama.cpp", extra="gguf").__file__)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    results = getattr(_library(), name)
    results.restype, results.argtypes = result, list(arguments)
    return results
