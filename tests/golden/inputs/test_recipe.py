"""A recipe is a line of JSON that gives the same tensors wherever it is read."""

import json
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.golden.errors import OptionError, RecipeError, ShapeError, UnknownSpec
from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.registry import spec, specs
from assay.runtime.errors import AssayError
from assay.verify.cases.case import Case, all_contents
from assay.verify.cases.sampler import Sampler, seeded

ATTENTION = {"B": 1, "H": 2, "Hkv": 1, "Sq": 2, "Sk": 3, "D": 4, "Dv": 4}
SOFTMAX = recipe("softmax", {"R": 2, "N": 3})


def case_of(name: str, seed: int) -> Case:
    """A small case of a spec, under options drawn from those that are flags, with contiguous tensors."""
    definition = spec(name)
    flags = {option: (False, True) for option, kind in definition.options.items() if kind.accepts(True)}
    sampler = Sampler(definition, "bfloat16", flags, layouts=("contiguous",), seed=seed)
    return replace(sampler.case(seeded(seed), style="small"), unused="plain")


def recipe_of(case: Case) -> Recipe:
    """The recipe of a case's inputs."""
    return Recipe(case.spec, case.sizes, case.dtypes, case.options, case.values, case.seed)


@pytest.mark.parametrize("name", specs())
def test_a_recipe_gives_the_numbers_of_a_case(name: str) -> None:
    """Goldens and examinations draw the same inputs, in the order of the signature, keywords apart."""
    for seed in range(5):
        case = case_of(name, seed)
        again = Recipe.from_json(recipe_of(case).to_json())
        expected = all_contents(case)
        keywords = {tensor.name for tensor in case.signature.tensors if tensor.keyword}
        positional = [tensor for name, tensor in expected.items() if name not in keywords]
        found = [*again.tensors(), *again.keywords().values()]
        for one, other in zip(found, [*positional, *(expected[name] for name in again.keywords())], strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        assert set(again.keywords()) == keywords


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(specs()), st.integers(0, 10**6))
def test_json_is_canonical(name: str, seed: int) -> None:
    """The JSON comes back as an equal recipe of equal key, whatever order and spaces it was written in."""
    first = recipe_of(case_of(name, seed))
    content = json.loads(first.to_json())
    shuffled = {part: content[part] for part in reversed(content)}
    for text in (first.to_json(), json.dumps(shuffled, indent=3)):
        again = Recipe.from_json(text)
        assert again == first
        assert (again.key, hash(again), again.to_json()) == (first.key, hash(first), first.to_json())
    assert pickle.loads(pickle.dumps(first)) == first
    assert " " not in first.to_json()


def test_other_recipes_have_other_keys() -> None:
    """Each part of a recipe moves its key."""
    others = [
        replace(SOFTMAX, spec="log_softmax"),
        replace(SOFTMAX, sizes={"R": 3, "N": 2}),
        replace(SOFTMAX, dtypes={"x": "bfloat16"}),
        replace(SOFTMAX, options={"a": None}),
        replace(SOFTMAX, values={"x": "wide"}),
        replace(SOFTMAX, seed=1),
    ]
    assert len({each.key for each in (SOFTMAX, *others)}) == 7
    assert all(each != SOFTMAX for each in others)


def test_a_recipe_is_filled_in() -> None:
    """Options, dtypes and distributions that are left out take their defaults, and stating these changes nothing."""
    short = recipe("attention", ATTENTION, "bf16", options={"window": [1, 0]})
    assert short.dtypes == {"q": "bfloat16", "k": "bfloat16", "v": "bfloat16"}
    assert short.values == {"q": "normal", "k": "normal", "v": "normal"}
    assert short.options["causal"] == "none"
    assert short.options["window"] == (1, 0)
    stated = recipe("attention", ATTENTION, short.dtypes, options=short.options, values=short.values, seed=0)
    assert stated == short
    assert stated.key == short.key


def test_a_distribution_goes_to_those_that_can_have_it() -> None:
    """One name for all leaves scales and indices at their plainest."""
    sizes = {"M": 2, "K": 4, "N": 2}
    assert recipe("gemm_fp8", sizes, "bfloat16", values="peaked").values == {
        "a": "peaked",
        "b": "peaked",
        "scale_a": "plain",
        "scale_b": "plain",
    }


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("sofmax", {}), UnknownSpec, "unknown spec 'sofmax'; did you mean 'softmax'?"),
        (("softmax", {"R": 2}), ShapeError, "softmax: no size for N; expected sizes for R, N"),
        (("softmax", {"R": 2, "N": 3, "M": 1}), ShapeError, "softmax: unknown dimension 'M'"),
        (("softmax", {"R": 2, "N": -3}), ShapeError, "softmax: N=-3; expected a whole number, zero or more"),
        (("softmax", {"R": True, "N": 3}), ShapeError, "softmax: R=True; expected a whole number"),
        (("attention", {**ATTENTION, "H": 3, "Hkv": 2}), ShapeError, "attention: H=3 must be a multiple of Hkv=2"),
        (("rope", {"B": 1, "S": 1, "H": 1, "D": 3}), ShapeError, "rope: .* has no shape under these sizes: D/2"),
        (("softmax", {"R": 2, "N": 3}, "bf17"), RecipeError, "softmax: x: .*bf17"),
        (("softmax", {"R": 2, "N": 3}, {}), RecipeError, "softmax: expected the dtype of at least one tensor"),
        (("softmax", {"R": 2, "N": 3}, {"y": "bf16"}), RecipeError, "softmax: dtype of unknown tensor 'y'"),
        (("softmax", {"R": 2, "N": 3}, "int4"), RecipeError, "softmax: x: no tensor of int4 can be made"),
        (
            ("gemm_int8", {"M": 1, "K": 2, "N": 2}, {"a": "bf16"}),
            RecipeError,
            "gemm_int8: a is always int8, got bfloat16",
        ),
    ],
)
def test_what_is_not_there_is_refused(arguments: tuple[Any, ...], error: type[AssayError], message: str) -> None:
    """One line says what was asked for, and what there is."""
    with pytest.raises(error, match=message) as caught:
        recipe(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"values": "norml"}, RecipeError, "softmax: unknown distribution 'norml'; did you mean 'normal'?"),
        ({"values": {"x": "norml"}}, RecipeError, "softmax: x: unknown distribution 'norml'"),
        ({"values": {"y": "normal"}}, RecipeError, "softmax: distribution of unknown tensor 'y'"),
        ({"options": {"axis": 1}}, OptionError, "softmax: unknown option 'axis'"),
        ({"seed": 1.5}, RecipeError, "softmax: seed must be a whole number, got 1.5"),
        ({"seed": True}, RecipeError, "softmax: seed must be a whole number, got True"),
    ],
)
def test_unknown_words_are_refused(keywords: dict[str, Any], error: type[AssayError], message: str) -> None:
    """Distributions, tensors, options and seeds that don't exist are named."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        recipe("softmax", {"R": 2, "N": 3}, **keywords)
    assert "\n" not in str(caught.value)


CONTENT: dict[str, Any] = json.loads(SOFTMAX.to_json())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the JSON of a recipe, got ''"),
        ("{", "expected the JSON of a recipe, got '{'"),
        ("[1]", "recipe: expected a table, got [1]"),
        (json.dumps({**CONTENT, "sise": {}}), "unknown key 'sise'; did you mean 'sizes'?"),
        (json.dumps({name: CONTENT[name] for name in CONTENT if name != "seed"}), "expected the field 'seed'"),
        (json.dumps({**CONTENT, "seed": 1.0}), "recipe.seed: expected a whole number, got 1.0"),
        (json.dumps({**CONTENT, "seed": True}), "recipe.seed: expected a whole number, got True"),
        (json.dumps({**CONTENT, "sizes": {"R": -1}}), "recipe.sizes[...]: expected a whole number >= 0"),
        (json.dumps({**CONTENT, "dtypes": {"x": 8}}), "recipe.dtypes[...]: expected text, got `int`"),
        (
            json.dumps({**CONTENT, "options": {"eps": {}}}),
            "recipe.options.eps: expected a number, name, flag, null or list",
        ),
        (json.dumps({**CONTENT, "spec": None}), "recipe.spec: expected text, got None"),
        (SOFTMAX.to_json().replace('"seed":0', '"seed":NaN'), "expected the JSON of a recipe, got"),
    ],
)
def test_other_json_is_refused(text: str, message: str) -> None:
    """What isn't exactly a recipe is refused in one line that says where it departs."""
    with pytest.raises(RecipeError, match=re.escape(message)) as caught:
        Recipe.from_json(text)
    assert "\n" not in str(caught.value)


def test_a_distribution_that_there_is_not_is_named() -> None:
    """A recipe read from JSON isn't checked until it is drawn; then one line says what is wrong."""
    text = recipe("softmax", {"R": 1, "N": 2}).to_json().replace('"normal"', '"norml"')
    with pytest.raises(RecipeError, match="x: unknown distribution 'norml'; did you mean 'normal'"):
        Recipe.from_json(text).tensors()


def test_equal_numbers_give_one_key() -> None:
    """An option of 1 and one of 1.0 ask for the same golden, and None stays None."""
    sizes = {"R": 1, "N": 2}
    one, other = (recipe("rmsnorm", sizes, options={"eps": eps}) for eps in (1, 1.0))
    assert one.key == other.key
    assert repr(one.options["eps"]) == "1.0"
    assert recipe("swiglu", sizes).options["limit"] is None
    assert repr(recipe("swiglu", sizes, options={"limit": 7}).options["limit"]) == "7.0"
    assert repr(recipe("cross_entropy", {"T": 1, "V": 2}).options["ignore_index"]) == "-100"
