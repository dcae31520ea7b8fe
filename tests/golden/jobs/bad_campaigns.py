"""Campaign files with a mistake: the text, the line to be named, and a part of what is to be said."""

from __future__ import annotations

HEAD = 'dtypes = ["float32"]\n'
SOFTMAX = HEAD + '[[golden]]\nspec = "softmax"\nshapes = [{ R = 2, N = 3 }]\n'
ATTENTION = HEAD + '[[golden]]\nspec = "attention"\n'

ONE = "shapes = [{ B=1, H=4, Hkv=4, Sq=1, Sk=1, D=8, Dv=8 }]\n"

BAD: list[tuple[str, int, str]] = [
    ("", 1, "expected at least one [[golden]] table"),
    ('golden = "softmax"\n', 1, "expected at least one [[golden]] table"),
    ('dtypes = ["float32"\n[[golden]]\n', 2, "no TOML ("),
    (SOFTMAX + "seeds = \n", 5, "no TOML (Invalid value at column 9); mend what stands there"),
    (SOFTMAX + 'digits = "', 5, "no TOML ("),
    ('distributions = ["gauss"]\n' + SOFTMAX, 1, "unknown distribution 'gauss'"),
    ("dtype = 1\n" + SOFTMAX, 1, "unknown key 'dtype'; did you mean 'dtypes'?"),
    (SOFTMAX + "\n# seeds\nseed = 3\n", 7, "unknown key 'seed'; did you mean 'seeds'?"),
    (HEAD + "[[golden]]\nspec = 'softmax'\n", 2, "has no shapes; add e.g. shapes = [{ R = 4, N = 64 }]"),
    (HEAD + "[[golden]]\nshapes = []\n", 2, 'has no spec; add e.g. spec = "softmax"'),
    (
        SOFTMAX.replace('"softmax"', '[\n"gemm",\n"sofmax"]').replace("R = 2", "M = 2, K = 1"),
        5,
        "unknown spec 'sofmax'; did you mean 'softmax'?",
    ),
    (SOFTMAX.replace('"softmax"', "7"), 3, "spec=7; expected the name of a spec, in quotes"),
    (SOFTMAX + 'dtypes = ["float32", "bfloat17"]\n', 5, "did you mean bfloat16"),
    (SOFTMAX + 'dtypes = ["float32",\n "int8"]\n', 6, "dtype 'int8' is that of integers"),
    (SOFTMAX + 'dtypes = ["float32", "float32"]\n', 5, "dtype 'float32' gives the same inputs as an earlier one"),
    (SOFTMAX + 'dtypes = [{ y = "float16" }]\n', 5, "dtype of unknown tensor 'y'"),
    (SOFTMAX + "dtypes = [16]\n", 5, "16; expected the name of a dtype"),
    (SOFTMAX + "dtypes = []\n", 5, "dtypes is an empty list"),
    (SOFTMAX.removeprefix(HEAD), 1, 'softmax needs dtypes; add e.g. dtypes = ["bfloat16"]'),
    (SOFTMAX + 'distributions = ["normal", "gaussian"]\n', 5, "unknown distribution 'gaussian'"),
    (SOFTMAX + 'distributions = [{ x = "normal" },\n{ y = "normal" }]\n', 6, "distribution of unknown tensor 'y'"),
    (SOFTMAX + 'distributions = ["normal", { x = "normal" }]\n', 5, "gives the same inputs as an earlier one"),
    (SOFTMAX + "options = { causal = ['none'] }\n", 5, "unknown option of softmax 'causal'"),
    (SOFTMAX + "options = ['none']\n", 5, "expected a table"),
    (SOFTMAX + "seeds = 0\n", 5, "seeds=0; expected how many"),
    (SOFTMAX + "seeds = [1, 2,\n 1]\n", 6, "seed 1; expected whole numbers, each once"),
    (SOFTMAX + "digits = [20, 0]\n", 5, "digits=0; expected whole numbers, one or more"),
    (SOFTMAX + "sample = -3\n", 5, "sample=-3; expected a whole number, one or more"),
    (SOFTMAX.replace("N = 3", "N = -3"), 4, "N=-3; expected a whole number, zero or more"),
    (SOFTMAX.replace("N = 3", "N = 2.5"), 4, "N=2.5; expected a whole number"),
    (SOFTMAX.replace(", N = 3", ""), 4, "softmax: no size for N"),
    (SOFTMAX.replace("N = 3", "N = 3, M = 1"), 4, "softmax: unknown dimension 'M'"),
    (
        SOFTMAX.replace("N = 3", "N = [3, 4]").replace("}]", "}, \n { R = 2, N = 4 }]"),
        5,
        "the shape R=2, N=4 is listed twice",
    ),
    (SOFTMAX.replace("N = 3", 'N = "llama.hiden"') + "[sizes.llama]\nhidden = 4\n", 4, "did you mean 'llama.hidden'?"),
    (SOFTMAX + "[sizes]\nhidden = -4\n", 6, "hidden=-4; expected a whole number"),
    (SOFTMAX.replace("{ R = 2, N = 3 }", "7"), 4, "shape 7; expected a table of sizes"),
    (
        ATTENTION + "[golden.shapes]\nB = 1\nH = 6\nHkv = 4\nSq = 1\nSk = 1\nD = 8\nDv = 8\n",
        6,
        "H=6 must be a multiple of Hkv=4",
    ),
    (
        ATTENTION + ONE + "[golden.options]\nsoftcap = [30.0,\n -1.0]\n",
        7,
        "option softcap=-1.0; expected a positive number or None",
    ),
    (ATTENTION + ONE + "options = { alibi = [true, true] }\n", 5, "alibi=True is listed twice"),
    (
        HEAD + '[[golden]]\nspec = "gemm_int4"\nshapes = [{ M = 1, N = 8, K = 100, g = 64 }]\n',
        4,
        "K=100 must be a multiple of g=64",
    ),
    (
        HEAD + '[[golden]]\nspec = "moe_route"\nshapes = [{ T = 1, E = 2 }]\noptions = { top_k = [1, 4] }\n',
        4,
        "E=2 must be at least top_k=4",
    ),
    (
        HEAD + '[[golden]]\nspec = "gemm_int8"\ndtypes = ["float32"]\nshapes = [{ M = 1, N = 1, K = 1 }]\n',
        4,
        "gemm_int8 fixes the dtype of every tensor; leave dtypes out",
    ),
    (
        SOFTMAX + 'name = "a"\n' + SOFTMAX.removeprefix(HEAD) + 'name = "a"\n',
        9,
        "the name 'a' is given in line 5 already",
    ),
    (SOFTMAX + "about = 3\n", 5, "unknown key 'about'"),
    ("about = 3\n" + SOFTMAX, 1, "about=3; expected text"),
    (
        SOFTMAX.replace("R = 2, N = 3", f"R = {list(range(400))}, N = {list(range(400))}"),
        4,
        "more than 100000 combinations",
    ),
]
