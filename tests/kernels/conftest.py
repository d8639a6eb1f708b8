"""The contract's checks stand outside a test module; pytest shows the values in their assertions all the same."""

import pytest

pytest.register_assert_rewrite("tests.kernels.contract")
