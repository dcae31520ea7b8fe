"""llama.cpp itself on a CPU, by the functions of the wheel xllamacpp: the logits of a GGUF file."""

import ctypes
from pathlib import Path
from typing import Any

import torch
import xllamacpp.xllamacpp

_LIBRARY = ctypes.CDLL(xllamacpp.xllamacpp.__file__)


class _Params(ctypes.Structure):
    """Parameters of a model or a context, larger than any version's: their defaults are all that is needed."""

    _fields_ = [("bytes", ctypes.c_uint8 * 1024)]


class _Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32)] + [
        (name, ctypes.c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")
    ]


def _function(name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(_LIBRARY, name)
    found.restype, found.argtypes = result, list(arguments)
    return found


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """What llama.cpp makes of each sequence of tokens [B, T] alone: [B, T, V], its caches in float16."""
    address, batch = ctypes.c_void_p, _Batch
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, address)(lambda *_: None)
    _function("llama_log_set", None, type(silent), address)(silent, None)
    model = _function("llama_model_load_from_file", address, ctypes.c_char_p, _Params)(
        str(path).encode(), _function("llama_model_default_params", _Params)()
    )
    assert model, f"llama.cpp can't load {path}"
    make, free = _function("llama_batch_init", batch, *[ctypes.c_int32] * 3), _function("llama_batch_free", None, batch)
    tokens = make(ids.shape[1], 0, 1)
    found = []
    for row in ids.tolist():
        context = _function("llama_init_from_model", address, address, _Params)(
            model, _function("llama_context_default_params", _Params)()
        )
        assert context
        whole = (ctypes.c_int32 * len(row))(*row)
        ctypes.memmove(tokens.token, whole, ctypes.sizeof(whole))
        for place in range(len(row)):
            ctypes.cast(tokens.pos, ctypes.POINTER(ctypes.c_int32))[place] = place
            ctypes.cast(tokens.n_seq_id, ctypes.POINTER(ctypes.c_int32))[place] = 1
            ctypes.cast(tokens.seq_id, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))[place][0] = 0
            ctypes.cast(tokens.logits, ctypes.POINTER(ctypes.c_int8))[place] = 1
        tokens.n_tokens = len(row)
        assert _function("llama_decode", ctypes.c_int32, address, batch)(context, tokens) == 0
        vocabulary = _function("llama_vocab_n_tokens", ctypes.c_int32, address)(
            _function("llama_model_get_vocab", address, address)(model)
        )
        start = _function("llama_get_logits", ctypes.POINTER(ctypes.c_float), address)(context)
        values = torch.frombuffer(bytearray(ctypes.string_at(start, len(row) * vocabulary * 4)), dtype=torch.float32)
        found.append(values.view(len(row), vocabulary))
        _function("llama_free", None, address)(context)
    free(tokens)
    _function("llama_model_free", None, address)(model)
    return torch.stack(found)
