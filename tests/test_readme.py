"""What the README says can be done, can be done."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)


def test_code_runs(tmp_path):
    """All blocks, in order, as one program."""
    assert PYTHON
    script = tmp_path / "readme.py"
    script.write_text("\n".join(PYTHON))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", README, re.M))
    assert {"quickstart", "test", "smollm2"} <= targets
    assert not {t for t in targets if not re.search(rf"^{t}:", makefile, re.M)}


def test_modules_and_files_exist():
    modules = set(re.findall(r"python -m (experiments[\w.]*)", README))
    assert modules
    files = set(re.findall(r"(?:experiments|docs|notebooks|adrl_jax|tests)/[\w/]+\.(?:py|ipynb|png|svg|json)", README))
    files |= {module.replace(".", "/") + ".py" for module in modules}
    assert not {path for path in files if not (ROOT / path).exists()}


@pytest.mark.parametrize("config", sorted(set(re.findall(r"experiments/configs/\w+\.py", README))))
def test_named_configs_say_how_they_are_run(config):
    assert f"--config={config}" in (ROOT / config).read_text()
