"""Names of head shapes, there and back, and the arithmetic of a row."""

import pytest

from kvtrial.host import shapes


@pytest.mark.parametrize(
    ("name", "q_heads", "kv_heads", "head_dim"),
    [
        ("9q3kv", 9, 3, 64),
        ("14q2kv", 14, 2, 64),
        ("6q2kv32d", 6, 2, 32),
        ("32q8kv128d", 32, 8, 128),
    ],
)
def test_a_name_stands_for_its_shape(name, q_heads, kv_heads, head_dim):
    shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    assert shapes.name_of({**shape, "layers": 30}) == name
    assert shapes.of_name(name) == shape


@pytest.mark.parametrize("name", ["", "9q", "9q3kvx", "kv", "9q3kv64", "a9q3kv"])
def test_what_is_no_name_stands_for_nothing(name):
    assert shapes.of_name(name) is None


def test_a_row_takes_two_multiply_adds_an_element_and_query_head():
    assert shapes.operations_a_row(14, 64) == 14 * 64 * (2 + 2)
