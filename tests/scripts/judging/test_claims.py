"""A norm that takes no form is held to the one that is claimed for it."""

import pytest
import torch

from kernels import InputError, load_backend, reference
from kernels.form import FORMS, LLAMA
from scripts.judging import claims
from tests.helpers import CPU
from tests.kernels.contract import EPS, rows, weights

RIGHT = "tests.scripts.proving.norms:right"


def test_a_function_without_a_form_is_called_without_one():
    backend = claims.load_as_claimed(RIGHT, CPU, FORMS["gemma"])
    assert backend.form == FORMS["gemma"]
    assert "held to be of the form: weight + 1" in backend.description
    x, weight = rows(6, 48), weights(48)
    torch.testing.assert_close(backend.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


def test_one_that_takes_a_form_gets_it():
    backend = claims.load_as_claimed("kernels.reference:rms_norm", CPU, FORMS["gemma"])
    x, weight = rows(6, 48), weights(48)
    assert torch.equal(backend.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS, *FORMS["gemma"]))
    assert claims.load_as_claimed("reference", CPU, LLAMA).form == LLAMA


def test_a_model_of_another_form_may_take_it_all_the_same():
    with pytest.raises(InputError, match="does not take this form"):
        load_backend(RIGHT, CPU, FORMS["torch"])
    backend = load_backend(f"scripts.judging.claims:{RIGHT}", CPU, FORMS["torch"])
    x, weight = rows(6, 48), weights(48)
    torch.testing.assert_close(backend.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    with pytest.raises(AttributeError):
        claims.__getattr__("nothing")
