"""Cases that are evidence are not even collected, unless a run asks for them with `-m evidence`."""

import pytest
from _pytest.mark.structures import ParameterSet

USUAL = "not evidence"  # `-m` of an ordinary run, as pyproject.toml says


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drop parameters that carry the mark `evidence` before pytest makes a test of each: thousands in all."""
    if metafunc.config.option.markexpr != USUAL:
        return
    own = metafunc.definition.own_markers
    whole = any(mark.name == "evidence" for mark in own)  # one case is left, for `-m` to deselect
    for index, mark in enumerate(own):
        if mark.name != "parametrize":
            continue
        names, values = (*mark.args, *([] if len(mark.args) > 1 else [mark.kwargs["argvalues"]]))
        values, kwargs = list(values), {key: value for key, value in mark.kwargs.items() if key != "argvalues"}
        usual = [position for position, value in enumerate(values) if not _is_evidence(value)][: 1 if whole else None]
        if kwargs.get("ids") is not None and not callable(kwargs["ids"]):
            ids = list(kwargs["ids"])
            kwargs["ids"] = [ids[position] for position in usual]
        own[index] = pytest.mark.parametrize.with_args(names, [values[position] for position in usual], **kwargs).mark


def _is_evidence(value: object) -> bool:
    return isinstance(value, ParameterSet) and any(getattr(mark, "name", "") == "evidence" for mark in value.marks)
