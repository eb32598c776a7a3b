import ast
import sys
import textwrap

import pytest

from experiments.bench import form
from experiments.bench.peers import client

PEER_SCRIPTS = sorted({*client.FOLDER.glob("*_g*.py"), *client.FOLDER.glob("*_train.py")})


def write_script(folder, body):
    script = folder / "peer.py"
    head = f"import os, sys, time\nsys.path.insert(0, {str(client.FOLDER)!r})\nimport protocol\n"
    script.write_text(head + textwrap.dedent(body))
    return script


ECHO = """
    def script(channel, config):
        print("noise of a library")
        os.system("echo noise of a subprocess")
        def run(request):
            if request.get("fail"):
                raise ValueError("asked to fail")
            time.sleep(request.get("sleep", 0))
            return {"tokens": request["tokens"] * config["factor"]}
        protocol.serve(channel, {"version": "1.0"}, run)
    protocol.main(script)
"""


def start(script, **config):
    return client.start("hf", script, config, client.pythons(""))


def test_peer_loads_once_and_answers_each_request(tmp_path):
    peer, reason = start(write_script(tmp_path, ECHO), factor=3)
    assert reason is None
    with peer:
        assert peer.facts == {"version": "1.0"}
        records = [peer.run(tokens=n, sleep=0.05) for n in (1, 2)]
        assert [record["tokens"] for record in records] == [3, 6]
        assert all(0.05 <= record["seconds"] < 5 for record in records)
        kept = form.alternate({"ours": lambda: 1.0, "hf": lambda: peer.run(tokens=1)["tokens"]}, repeats=3)
        assert kept == {"ours": [1.0] * 3, "hf": [3] * 3}
    assert peer._process.poll() == 0
    peer.close()


def test_peer_that_fails_says_why(tmp_path):
    peer, _ = start(write_script(tmp_path, ECHO), factor=1)
    with peer:
        with pytest.raises(client.PeerError, match="hf: ValueError: asked to fail"):
            peer.run(fail=True)
        with pytest.raises(client.PeerError, match="exit code 1"):
            peer.run(tokens=1)


def test_peer_that_hangs_is_killed(tmp_path):
    peer, _ = start(write_script(tmp_path, ECHO), factor=1)
    with peer, pytest.raises(client.PeerError, match=r"did not answer within 0\.2 s"):
        peer.run(timeout=0.2, sleep=60, tokens=1)
    assert peer._process.poll() is not None


def test_absent_package_is_a_reason_and_other_failures_are_errors(tmp_path):
    peer, reason = start(write_script(tmp_path, "import a_package_that_nobody_has"))
    assert peer is None
    assert "not installed" in reason and "--peer_python=hf=PATH" in reason
    with pytest.raises(client.PeerError, match="KeyError: 'factor'"):
        broken, _ = start(write_script(tmp_path, "def script(channel, config): config['factor']\nprotocol.main(script)"))
        assert broken is None


def test_flags_name_what_is_legal(tmp_path):
    assert client.names("hf,tunix", client.GENERATE) == ["hf", "tunix"] and client.names("", client.GRPO) == []
    with pytest.raises(ValueError, match="peer='hf' has no part in this benchmark; choose of trl, tunix"):
        client.names("hf", client.GRPO)
    assert client.pythons(f"tunix={sys.executable}")["tunix"] == sys.executable
    for bad in ("tunix", "tunix=/no/such/python", f"vllm={sys.executable}"):
        with pytest.raises(ValueError):
            client.pythons(bad)


@pytest.mark.parametrize("script", PEER_SCRIPTS, ids=lambda path: path.name)
def test_peer_scripts_need_nothing_of_ours(script):
    """They run in the peer's environment, where this project is not installed."""
    assert {path.name for path in PEER_SCRIPTS} >= {*client.GENERATE.values(), *client.GRPO.values(), *client.TRAIN.values()}
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert "protocol" in imported
    assert not imported & {"adrl_jax", "adrl_kernels", "experiments"}
