"""Configurations in files, and what is said of files that are not one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chunkmem.config import Config
from chunkmem.data.errors import ConfigError


def test_from_json_takes_strings_and_paths_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "chunkmem.json"
    file.write_bytes(b'\xef\xbb\xbf{"gradient_clipping": 1}')
    assert Config.from_json(file) == Config.from_json(str(file)) == Config(gradient_clipping=1.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not JSON: line 1, column 2: Expecting property name enclosed in double quotes"),
        (b'{\n "precision": fp32}', "is not JSON: line 2, column 15: Expecting value"),
        (b"", "is empty; a configuration of defaults is written {}"),
        (b" \n", "is empty; a configuration of defaults is written {}"),
        (b'{"precision": "\xff"}', "is not UTF-8 text (byte 15 does not fit); save it as UTF-8"),
        (b"{}".decode().encode("utf-16"), "is not UTF-8 text (byte 0 does not fit); save it as UTF-8"),
        (b'{"a": 1, "b": 2, "a": 3}', "cannot be used: the key 'a' is given twice in one object"),
        (b"[" * 100_000, "is nested too deeply to be a configuration"),
    ],
)
def test_files_that_are_not_json(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "chunkmem.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        Config.from_json(file)
    assert str(raised.value) == f"{file} {says}"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "the configuration is [], but must be an object with keys"),
        ("null", "the configuration is None, but must be an object with keys"),
        ('{"precision": "x"}', 'precision is \'x\', but must be "fp32", "bf16" or "fp16"'),
        ('{"gradient_clipping": NaN}', "gradient_clipping is nan, but must be a finite number; 0 or less is off"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping is inf, but must be a finite number; 0 or less is off"),
    ],
)
def test_errors_of_values_name_the_file(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "chunkmem.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as raised:
        Config.from_json(file)
    assert str(raised.value) == f"{file}: {says}"


def test_an_integer_of_too_many_digits(tmp_path: Path) -> None:
    file = tmp_path / "chunkmem.json"
    file.write_text('{"default_chunk_size": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError, match=f"^{re.escape(str(file))} cannot be used: .* digits"):
        Config.from_json(file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))} cannot be read: Is a directory$"):
        Config.from_json(tmp_path)
    missing = tmp_path / "missing.json"
    with pytest.raises(ConfigError, match=f"^{re.escape(str(missing))} cannot be read: No such file or directory$"):
        Config.from_json(missing)


@pytest.mark.parametrize("path", [None, 3, b"chunkmem.json", "chunk\0mem.json", {}])
def test_what_is_not_a_path(path: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        Config.from_json(path)
    assert str(raised.value) == f"{path!r} is not the path of a JSON file"
