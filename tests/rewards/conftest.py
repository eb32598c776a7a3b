import importlib
import pathlib

import pytest


@pytest.fixture
def misbehaving(monkeypatch):
    """The module of scorers that misbehave, importable by worker processes too."""
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent))
    return importlib.import_module("misbehaving_scorers")
