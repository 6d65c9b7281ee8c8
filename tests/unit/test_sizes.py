"""Sizes in bytes: read, written, refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data.errors import ConfigError
from chunkmem.data.sizes import MAX_NBYTES, format_nbytes, parse_nbytes, shown


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (0, 0),
        (4096, 4096),
        (MAX_NBYTES, MAX_NBYTES),
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("512 B", 512),
        ("1KiB", 1024),
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("200GB", 200 * 10**9),
        ("3kB", 3000),
        ("3KB", 3000),
        ("2MiB", 2 * 2**20),
        ("2MB", 2 * 10**6),
        ("2TiB", 2 * 2**40),
        ("2TB", 2 * 10**12),
        ("2PiB", 2 * 2**50),
        ("2PB", 2 * 10**15),
        ("7EiB", 7 * 2**60),
        ("9EB", 9 * 10**18),
        # Not 0.1 * 1024 in floating point, and never more than written: 102.4 bytes are 102.
        ("0.1KiB", 102),
        ("0.3GB", 300_000_000),
        ("8.999999999999999999GB", 8_999_999_999),
    ],
)
def test_parse_nbytes(value: int | str, nbytes: int) -> None:
    assert parse_nbytes(value) == nbytes


@pytest.mark.parametrize(
    "value",
    [
        *(
            "",
            " ",
            "GiB",
            "B",
            "24GiBs",
            "24Gib",
            "24gib",
            "24G",
            "24Gi",
            "24Gb",
            "24 GiB ",
            " 24GiB",
            "24  GiB",
            "24\tGiB",
        ),
        *("-1", "-1GiB", "+1GiB", "1.5", "1.5B", "1.GiB", ".5GiB", "1e9", "1e3GiB", "0x10", "4_096", "1,5GiB", "٤GiB"),
        *("nan", "nanGiB", "inf", "auto", "null", "8EiB", "9" * 25, "1\n"),
        *(-1, MAX_NBYTES + 1, True, False, 4096.0, float("nan"), None, [], b"4096"),
    ],
)
def test_parse_nbytes_refuses(value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_nbytes(value)
    message = str(raised.value)
    assert message.startswith(f"{value!r} is not a size in bytes; allowed: ")
    assert message.endswith('0 to 2**63 - 1, as an integer or a string such as "4096", "512MiB", "1.5GiB" or "200GB"')
    assert "\n" not in message


def test_an_integer_that_python_does_not_print_is_still_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^a huge int is not a size in bytes"):
        parse_nbytes(10**5000)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (3 * 2**29, "1.50 GiB"),
        # 1023.999 KiB, 1023.996 GiB: rounded, they are the next unit's 1.00.
        (2**20 - 1, "1.00 MiB"),
        (2**40 - 2**22, "1.00 TiB"),
        (2**40 - 2**23, "1023.99 GiB"),
        (MAX_NBYTES, "8.00 EiB"),
        (2**73, "8192.00 EiB"),
        (-512, "-512 B"),
        (-3 * 2**29, "-1.50 GiB"),
        (1 - 2**20, "-1.00 MiB"),
    ],
)
def test_format_nbytes(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 7 * 2**60))
def test_what_is_formatted_is_read_back_to_the_decimals_shown(nbytes: int) -> None:
    text = format_nbytes(nbytes)
    unit = parse_nbytes(f"1 {text.split()[1]}")
    # Half of the last decimal, the byte that `parse_nbytes` may drop, and what a float cannot hold of an integer.
    assert abs(parse_nbytes(text) - nbytes) <= unit * 0.005 + 1 + nbytes * 2**-52
    assert nbytes < 1024 or 1 <= float(text.split()[0]) < 1024


def test_a_long_value_is_cut_in_messages() -> None:
    assert shown("x" * 100) == "'" + "x" * 76 + "..."
    assert shown("x" * 78) == repr("x" * 78)
