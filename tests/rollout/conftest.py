"""One set of engines for all tests of this folder."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import rollout_world


@pytest.fixture(scope="session")
def world():
    return rollout_world.World()


@pytest.fixture(scope="session")
def requests_of():
    return rollout_world.make_requests
