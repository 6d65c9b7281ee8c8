"""`chunkmem config`: a reference that cannot differ from what is read, and a schema that takes what is taken."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chunkmem.cli.main import main
from chunkmem.config import Config, flattened
from tests.helpers.config_keys import CASES, DISK_KEYS, KEYS

ROOT = Path(__file__).parents[2]


def printed(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["config", *map(str, arguments)]) == status
    return capsys.readouterr().out


def test_every_key_is_told_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    told = {key["key"]: key for key in json.loads(printed(capsys, "--json"))["keys"]}
    assert told.keys() == CASES.keys()
    defaults = flattened(Config().to_dict())
    assert {path: key["default"] for path, key in told.items() if path in KEYS} == defaults
    assert {path for path, key in told.items() if key["is_required"]} == {"memory.disk.path", "memory.disk.capacity"}
    assert all(key["about"].endswith(".") for key in told.values())
    text = printed(capsys)
    assert all(f"\n  {path} = " in text for path in CASES)


def test_the_page_of_the_documentation_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == printed(capsys, "--markdown"), "chunkmem config --markdown > docs/configuration.md"


def as_document(path: str, value: object) -> dict[str, Any]:
    """The smallest configuration that sets one key."""
    *sections, name = path.split(".")
    others = {"path": "swap", "capacity": 1} if path in DISK_KEYS else {}
    document: dict[str, Any] = {**others, name: value}
    for section in reversed(sections):
        document = {section: document}
    return document


def is_json(value: object) -> bool:
    """Tell whether a file could say so."""
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    if isinstance(value, dict):
        return all(map(is_json, value.values()))
    return not isinstance(value, bytes) and not (isinstance(value, float) and not math.isfinite(value))


@pytest.mark.parametrize("path", CASES)
def test_the_schema_takes_and_refuses_what_the_key_does(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(printed(capsys, "--schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for given, _ in CASES[path].good:
        as_read = json.loads(json.dumps(given))
        assert validator.is_valid(as_document(path, as_read)), given
    # How sizes are spelled is not said in the schema; 2.0 is an integer in JSON; 10**400 is a number.
    looser = {str} if "capacity" in path or path in ("memory.device", "memory.host") else set()
    for given in filter(is_json, CASES[path].bad):
        if type(given) in looser or (isinstance(given, float) and given.is_integer()) or given == 10**400:
            continue
        assert not validator.is_valid(as_document(path, given)), given


def test_the_schema_knows_no_other_key(capsys: pytest.CaptureFixture[str]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(printed(capsys, "--schema")))
    assert validator.is_valid({})
    assert validator.is_valid({"client": {"opts": {"mem_saving_com": True}}}), "another spelling, from PatrickStar"
    assert not validator.is_valid({"chunk_size": 4})
    assert not validator.is_valid({"memory": {"gpu": "4GiB"}})


def test_a_file_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chunkmem.json"
    file.write_text('{"memory": {"device": "4GiB"}, "gradient_clipping": 0, "precision": "bf16"}', encoding="utf-8")
    assert printed(capsys, file) == 'precision = "bf16"\nmemory.device = 4294967296\n'
    assert json.loads(printed(capsys, file, "--json"))["set"] == {"precision": "bf16", "memory.device": 4 << 30}
    file.write_text("{}", encoding="utf-8")
    assert printed(capsys, file) == "every key has its default\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"memry": 1}', "memry, set to 1, is not a known key (did you mean memory?)"),
        ('{"memory": {"device": "4 apples"}}', "memory.device is '4 apples', but must be null, or a size in bytes"),
        ("[]", "must be an object with keys"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_file(content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chunkmem.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main(["config", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_a_file_is_no_part_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "chunkmem.json", "--schema"]) == 2
    assert "leave out the file" in capsys.readouterr().err
