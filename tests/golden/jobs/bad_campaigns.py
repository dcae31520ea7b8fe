"""Campaign files with a mistake: the text, and what is to be said: the place first."""

HEAD = 'dtypes = ["float32"]\n'
SOFTMAX = HEAD + '[[golden]]\nspec = "softmax"\nshapes = [{ R = 2, N = 3 }]\n'
ATTENTION = HEAD + '[[golden]]\nspec = "attention"\n'

ONE = "shapes = [{ B=1, H=4, Hkv=4, Sq=1, Sk=1, D=8, Dv=8 }]\n"

BAD: list[tuple[str, str]] = [
    ("", "expected at least one [[golden]] table"),
    ('golden = "softmax"\n', "golden: expected a list, got 'softmax'"),
    ('dtypes = ["float32"\n[[golden]]\n', "2: no TOML ("),
    (SOFTMAX + "seeds = \n", "5: no TOML (Invalid value at column 9); mend what stands there"),
    (SOFTMAX + 'digits = "', "5: no TOML ("),
    ('distributions = ["gauss"]\n' + SOFTMAX, "distributions[0]: unknown distribution 'gauss'"),
    ("dtype = 1\n" + SOFTMAX, "unknown key 'dtype'; did you mean 'dtypes'?"),
    (SOFTMAX + "\n# seeds\nseed = 3\n", "golden[0]: unknown key 'seed'; did you mean 'seeds'?"),
    (
        HEAD + "[[golden]]\nspec = 'softmax'\n",
        "golden[0]: this [[golden]] table has no shapes; add e.g. shapes = [{ R = 4, N = 64 }]",
    ),
    (HEAD + "[[golden]]\nshapes = []\n", 'golden[0]: this [[golden]] table has no spec; add e.g. spec = "softmax"'),
    (
        SOFTMAX.replace('"softmax"', '[\n"gemm",\n"sofmax"]').replace("R = 2", "M = 2, K = 1"),
        "golden[0].spec[1]: unknown spec 'sofmax'; did you mean 'softmax'?",
    ),
    (SOFTMAX.replace('"softmax"', "7"), "golden[0].spec: expected text or a list, got 7"),
    (
        SOFTMAX + 'dtypes = ["float32", "bfloat17"]\n',
        "golden[0].dtypes[1]: unknown number format 'bfloat17'; did you mean 'bfloat16'?",
    ),
    (
        SOFTMAX + 'dtypes = ["float32",\n "int8"]\n',
        "golden[0].dtypes[1]: dtype 'int8' is that of integers; expected a floating-point dtype",
    ),
    (
        SOFTMAX + 'dtypes = ["float32", "float32"]\n',
        "golden[0].dtypes[1]: 'float32' gives the same inputs as an earlier one",
    ),
    (SOFTMAX + 'dtypes = [{ y = "float16" }]\n', "golden[0].dtypes[0]: softmax: dtype of unknown tensor 'y'"),
    (SOFTMAX + "dtypes = [16]\n", "golden[0].dtypes[0]: expected text or a table, got 16"),
    (SOFTMAX + "dtypes = []\n", "golden[0].dtypes: expected a list of length >= 1, got []"),
    (SOFTMAX.removeprefix(HEAD), 'golden[0]: softmax needs dtypes; add e.g. dtypes = ["bfloat16"]'),
    (
        SOFTMAX + 'distributions = ["normal", "gaussian"]\n',
        "golden[0].distributions[1]: softmax: unknown distribution 'gaussian'",
    ),
    (
        SOFTMAX + 'distributions = [{ x = "normal" },\n{ y = "normal" }]\n',
        "golden[0].distributions[1]: softmax: distribution of unknown tensor 'y'",
    ),
    (
        SOFTMAX + 'distributions = ["normal", { x = "normal" }]\n',
        "golden[0].distributions[1]: {'x': 'normal'} gives the same inputs as an earlier one",
    ),
    (SOFTMAX + "options = { causal = ['none'] }\n", "golden[0].options: unknown option of softmax 'causal'"),
    (SOFTMAX + "options = ['none']\n", "golden[0].options: expected a table, got ['none']"),
    (SOFTMAX + "seeds = 0\n", "golden[0].seeds: expected a whole number >= 1, got 0"),
    (SOFTMAX + "seeds = [1, 2,\n 1]\n", "golden[0].seeds[2]: 1 is listed twice"),
    (SOFTMAX + "digits = [20, 0]\n", "golden[0].digits[1]: expected a whole number >= 1, got 0"),
    (SOFTMAX + "sample = -3\n", "golden[0].sample: expected a whole number >= 1, got -3"),
    (SOFTMAX.replace("N = 3", "N = -3"), "golden[0].shapes[0].N: expected a whole number >= 0, got -3"),
    (SOFTMAX.replace("N = 3", "N = 2.5"), "golden[0].shapes[0].N: expected a whole number, text or a list, got 2.5"),
    (SOFTMAX.replace(", N = 3", ""), "golden[0].shapes[0]: softmax: no size for N; expected sizes for R, N"),
    (SOFTMAX.replace("N = 3", "N = 3, M = 1"), "golden[0].shapes[0].M: softmax: unknown dimension 'M'"),
    (
        SOFTMAX.replace("N = 3", "N = [3, 4]").replace("}]", "}, \n { R = 2, N = 4 }]"),
        "golden[0].shapes[1]: the shape R=2, N=4 is listed twice",
    ),
    (
        SOFTMAX.replace("N = 3", 'N = "llama.hiden"') + "[sizes.llama]\nhidden = 4\n",
        "golden[0].shapes[0].N: N: unknown size 'llama.hiden'; did you mean 'llama.hidden'?",
    ),
    (SOFTMAX + "[sizes]\nhidden = -4\n", "sizes.hidden: expected a whole number >= 0, got -4"),
    (SOFTMAX.replace("{ R = 2, N = 3 }", "7"), "golden[0].shapes[0]: expected a table, got 7"),
    (
        ATTENTION + "[golden.shapes]\nB = 1\nH = 6\nHkv = 4\nSq = 1\nSk = 1\nD = 8\nDv = 8\n",
        "golden[0].shapes.H: attention: H=6 must be a multiple of Hkv=4",
    ),
    (
        ATTENTION + ONE + "[golden.options]\nsoftcap = [30.0,\n -1.0]\n",
        "golden[0].options.softcap[1]: attention: option softcap=-1.0; expected a positive number or None",
    ),
    (ATTENTION + ONE + "options = { alibi = [true, true] }\n", "golden[0].options.alibi[1]: True is listed twice"),
    (
        HEAD + '[[golden]]\nspec = "gemm_int4"\nshapes = [{ M = 1, N = 8, K = 100, g = 64 }]\n',
        "golden[0].shapes[0].K: gemm_int4: K=100 must be a multiple of g=64",
    ),
    (
        HEAD + '[[golden]]\nspec = "moe_route"\nshapes = [{ T = 1, E = 2 }]\noptions = { top_k = [1, 4] }\n',
        "golden[0].shapes[0].E: moe_route: E=2 must be at least top_k=4",
    ),
    (
        HEAD + '[[golden]]\nspec = "gemm_int8"\ndtypes = ["float32"]\nshapes = [{ M = 1, N = 1, K = 1 }]\n',
        "golden[0].dtypes: gemm_int8 fixes the dtype of every tensor; leave dtypes out",
    ),
    (
        SOFTMAX + 'name = "a"\n' + SOFTMAX.removeprefix(HEAD) + 'name = "a"\n',
        "golden[1].name: golden[0] has the name 'a' already; choose another",
    ),
    (SOFTMAX + "about = 3\n", "golden[0]: unknown key 'about'"),
    ("about = 3\n" + SOFTMAX, "about: expected text, got 3"),
    (
        SOFTMAX.replace("R = 2, N = 3", f"R = {list(range(400))}, N = {list(range(400))}"),
        "golden[0].shapes[0]: more than 100000 combinations of sizes and options; split the table",
    ),
]
