"""Shared fixtures of the tests with real processes."""

import pytest


@pytest.fixture
def bus():
    """A daemon and an agent of the test's own."""
    import tensorbus  # the tests of tensorbusctl bench run without the module

    with tensorbus.local() as running:
        yield running
