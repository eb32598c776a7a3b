"""Every notebook runs top to bottom, in a process of its own, without a Jupyter kernel."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code(path: pathlib.Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def run(path: pathlib.Path, folder: pathlib.Path) -> str:
    script = folder / f"{path.stem}.py"
    script.write_text(code(path))
    environment = {**os.environ, "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_quickstart_says_what_it_promises(tmp_path):
    said = run(next(path for path in NOTEBOOKS if path.stem == "quickstart"), tmp_path)
    assert "identical to plain decoding: {'off': True, 'ngram-d3': True, 'eagle-d3': True}" in said
    assert "identical to plain decoding: True" in said
    assert "policy version 400 -> 401" in said
    agreement = float(said.split("differ by at most ")[1].split()[0])
    assert agreement < 1e-4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_well_formed(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert [cell["id"] for cell in notebook["cells"]] == sorted({cell["id"] for cell in notebook["cells"]})
    compile(code(path), str(path), "exec")
