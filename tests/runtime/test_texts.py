"""Texts of others are read within limits: a content, or one line of the caller's error, and never a wait."""

import json
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from assay.runtime.errors import SettingError
from assay.runtime.files import LARGEST, read_text
from assay.runtime.output import visible
from assay.runtime.records import from_json, from_toml
from assay.runtime.source import syntax_tree

calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine

LINE_ENDS = st.sampled_from(["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"])
SIGNS = st.sampled_from('[]{}",:=#.\\ud80')
TEXTS = st.lists(st.one_of(st.text(max_size=12), LINE_ENDS, SIGNS), max_size=30).map("".join)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
CONTENTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def refused(call: Any, *arguments: Any) -> str:
    with pytest.raises(SettingError) as caught:
        call(*arguments, SettingError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def outcome(parse: Any, text: str) -> tuple[Any, str | None]:
    """The content of a text, or the line that refuses it."""
    try:
        return parse(text, "it", SettingError), None
    except SettingError as error:
        return None, str(error)


def test_a_text_is_read(tmp_path: Path) -> None:
    """Without a byte order mark, each line end as one character; a form feed ends no line."""
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\x0c\nfour")
    assert read_text(tmp_path / "a", SettingError) == "one\ntwo\nthree\x0c\nfour"


def test_what_is_no_small_text_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "bytes").write_bytes(b"abc\xff")
    (tmp_path / "lone").write_bytes(b"\xed\xa0\x80")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(LARGEST + 1)
    for name, words in (
        ("pipe", "expected a file, got a pipe"),
        ("", "expected a file, got a folder"),
        ("loop", "symbolic links"),
        ("none", "No such file"),
        ("bytes", "byte 3 is no UTF-8"),
        ("lone", "byte 0 is no UTF-8"),
        ("large", "expected at most 67,108,864 bytes"),
        ("a\0b", "null"),
        ("\ud800", "surrogates"),
        ("n" * 5000, "name too long"),
    ):
        assert words in refused(read_text, tmp_path / name)
    assert "got a device" in refused(read_text, "/dev/zero")
    assert len(refused(read_text, "n" * 5000)) < 300


@calm
@given(TEXTS)
def test_any_text_is_json_or_refused_in_one_line(text: str) -> None:
    content, error = outcome(from_json, text)
    assert content == json.loads(text) if error is None else error.startswith("it: is no JSON (")


@calm
@given(CONTENTS)
def test_json_comes_back(content: Any) -> None:
    try:
        text = json.dumps(content, allow_nan=False)
    except ValueError:
        refused(from_json, json.dumps(content), "it")
    else:
        assert from_json(text, "it", SettingError) == content


@calm
@given(TEXTS)
def test_any_text_is_toml_or_refused_in_one_line(text: str) -> None:
    content, error = outcome(from_toml, text)
    assert repr(content) == repr(tomllib.loads(text)) if error is None else error.startswith("it:")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "more than 100 levels"),
        ("[" * 101 + "]" * 101, "more than 100 levels"),
        ('{"a":' * 500 + "1" + "}" * 500, "more than 100 levels"),
        ("9" * 6000, "out of range"),
        ("1e999", "out of range"),
        ('"\\ud800"', "is no JSON"),
        ("NaN", "is no JSON"),
        ('"\0"', "is no JSON"),
    ],
)
def test_hostile_json_is_one_line(text: str, words: str) -> None:
    assert words in refused(from_json, text, "it")
    assert from_json("[" * 100 + "]" * 100, "it", SettingError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 20_000 + "]" * 20_000, "it: is no TOML (more than 100 levels)"),
        (".".join(["a"] * 5000) + " = 1", "it: is no TOML (more than 100 levels)"),
        ("a = " + "9" * 6000, "4300 digits"),
        ("a = 1\nb = \n", "it:2: is no TOML (Invalid value at column 5); mend what stands there"),
        ('a = 1\nb = "', "it:2: is no TOML ("),
    ],
)
def test_hostile_toml_is_one_line(text: str, words: str) -> None:
    assert words in refused(from_toml, text, "it")


@calm
@given(TEXTS)
def test_any_text_is_python_or_a_syntax_error(text: str) -> None:
    with suppress(SyntaxError):
        syntax_tree(text)


@pytest.mark.parametrize("text", ["(" * 300, "-" * 3000 + "1", "+".join("1" * 30_000), "a\0b", "[" * 90_000])
def test_python_that_is_nested_too_deeply_is_a_syntax_error(text: str) -> None:
    with pytest.raises(SyntaxError):
        syntax_tree(text)


@calm
@given(st.text())
def test_a_shown_text_has_nothing_that_a_terminal_obeys(text: str) -> None:
    shown = visible(text)
    assert not any((letter < " " and letter not in "\t\n") or "\x7f" <= letter <= "\x9f" for letter in shown)
    assert visible(shown) == shown
    assert len(shown) >= len(text)


def test_plain_texts_are_shown_as_they_are() -> None:
    assert visible("ключ → 😀 ±∞\n\tx\\y") == "ключ → 😀 ±∞\n\tx\\y"
    assert visible("\x1b[31mred\r\u202e\ud800") == "\\x1b[31mred\\r\\u202e\\ud800"
