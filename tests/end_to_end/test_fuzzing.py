"""Untrusted input is read or refused, without other errors, crashes or reads out of bounds."""

import shutil
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fuzzing

EXAMPLES = 300


@pytest.fixture(scope="module", autouse=True)
def folder():
    yield
    shutil.rmtree(fuzzing.FOLDER, ignore_errors=True)


@pytest.mark.parametrize("name", fuzzing.TARGETS)
def test_garbage_is_refused_and_nothing_else(name):
    target = fuzzing.TARGETS[name]

    @settings(max_examples=EXAMPLES)
    @given(st.integers(0, 2**32))
    def read(seed):
        target.read(target.make(Random(seed)))

    read()
