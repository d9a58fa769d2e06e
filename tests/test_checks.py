"""Whole numbers in configurations: what is refused, and that ranks write the same ``repr``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from consensus_opt import Every, Fixed, PostLocal, QuadraticSync, StackedTransport
from consensus_opt.checks import whole

MAKERS: dict[str, Callable[[int], object]] = {
    "period": lambda value: Every(value),
    "until": lambda value: PostLocal(value),
    "min_period": lambda value: QuadraticSync(0.02, value),
    "exchanges": lambda value: Fixed(value),
    "the number of workers": lambda value: StackedTransport(value),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_integer_of_any_type_is_kept_as_a_plain_one(name: str) -> None:
    assert repr(MAKERS[name](np.int64(3))) == repr(MAKERS[name](3))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("value", [True, 2.0, "2", None], ids=repr)
def test_the_wrong_kind_is_a_type_error(name: str, value: int) -> None:
    with pytest.raises(TypeError, match=f"{name} is {value!r}; it must be an integer of at least"):
        MAKERS[name](value)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("value", [0, -4])
def test_the_wrong_number_is_a_value_error_that_says_what_to_write(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; .* at least 1; write \w+\(.*\)"):
        MAKERS[name](value)


@pytest.mark.parametrize("value", [torch.tensor(2.5), np.array([1, 2])], ids=str)
def test_an_array_that_is_no_integer_is_a_type_error(value: int) -> None:
    with pytest.raises(TypeError, match=r"k is .*; write 3 or more"):
        whole(value, "k", least=3)
