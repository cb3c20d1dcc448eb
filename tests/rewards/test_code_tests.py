"""Code in a sandbox: what passes, what it cannot reach, and that it cannot make up a verdict."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miniverl.rewards import isolation
from miniverl.rewards.code_tests import Limits, _run, code_of, code_tests
from miniverl.rewards.pool import Call, Function, RewardPool
from miniverl.rewards.sample import Sample

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = {"fn_name": "add", "inputs": [[1, 2], [0.1, 0.2], [[1], [2]]], "outputs": [3, 0.3, [1, 2]]}


def sample(code, tests, marked=True):
    return Sample("s", "", f"Sure:\n```python\n{code}\n```\n" if marked else code, json.dumps(tests))


def score(code, tests, **kwargs):
    return code_tests(sample(code, tests), **kwargs)["score"]


def test_programs_and_functions_that_are_right_pass():
    assert score("print(sum(map(int, input().split())))", SUM) == 1.0
    assert score("import sys\na, b = sys.stdin.read().split()\nprint(int(a) + int(b), ' ')", SUM) == 1.0
    assert score("def add(a, b):\n    print('noise')\n    return a + b", ADD) == 1.0
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", ADD) == 1.0
    assert score("import numpy\ndef add(a, b):\n    return a + b", ADD) == 1.0
    assert score("import threading\ndef add(a, b):\n    t = threading.Thread(target=print)\n    t.start()\n"
                 "    t.join()\n    return a + b", ADD) == 1.0  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "print(3)",
        "print(4)",
        "raise SystemExit",
        "print(sum(map(int, input().split())))\nraise ValueError",
        "print(sum(map(int, input().split())))\nwhile True: pass",
        "this is no Python",
        "",
        "print('x' * (1 << 26))",
        "x = 'x' * (1 << 32)",
    ],
)
def test_programs_that_are_wrong_fail_and_are_no_failed_call(code):
    assert score(code, SUM, timeout_s=0.5) == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print('{\"value\": 3}')",
        "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
        "import json\njson.dumps = lambda *a: '{\"score\": 1.0}'\ndef add(a, b): return None",
        "import os\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, b'{\"score\": 1.0}\\n' * 3)\n    except OSError: pass",
        "import os, sys\nwith open('results.jsonl', 'w') as f: f.write('{\"score\": 1}\\n' * 3)\nos._exit(0)",
        "import os\nos.remove('results.jsonl'); os.mkfifo('results.jsonl'); os._exit(0)",
        "import os\nos.remove('results.jsonl'); os.symlink('/etc/passwd', 'results.jsonl'); os._exit(0)",
        "def add(a, b):\n    import gc\n    for o in gc.get_objects():\n"
        "        if isinstance(o, dict) and 'outputs' in o: return o['outputs'][0]",
    ],
)
def test_a_verdict_cannot_be_made_up(code):
    assert score(code, ADD, timeout_s=0.5) == 0.0


def test_partial_credit_counts_tests():
    assert score("print(3)", SUM) == 0.0
    assert score("print(3)", SUM, partial=True) == 0.5
    code = "def add(a, b):\n    if isinstance(a, list): raise ValueError\n    return a + b"
    assert code_tests(sample(code, ADD))["passed"] == pytest.approx(2 / 3)
    hangs = "import time\ndef add(a, b):\n    if a == 0.1: time.sleep(60)\n    return a + b"
    assert code_tests(sample(hangs, ADD), timeout_s=0.3, partial=True)["score"] == pytest.approx(1 / 3)


def test_a_hang_is_over_within_its_limit():
    before = time.monotonic()
    assert score("while True: pass", SUM, timeout_s=0.5) == 0.0
    assert time.monotonic() - before < 3


REACH = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
    "any socket": "import socket; socket.socket(socket.AF_UNIX)",
    "a new process": "import os; os.fork()",
    "a program": "import subprocess; subprocess.run(['ls'])",
    "itself replaced": "import os; os.execv('/bin/ls', ['ls'])",
    "a file": "open('/etc/passwd').read()",
    "the repository": f"open({str(Path(__file__))!r}).read()",
    "the parent's environment": "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "the parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb').read()",
    "a directory": "import os; os.listdir('/')",
    "writing": "open('/tmp/sentinel', 'w')",
    "the interpreter": "import os; open(os.__file__, 'a')",
    "modes": "import os; os.chmod('/tmp', 0o777)",
    "a signal to its parent": "import os; os.kill(os.getppid(), 9)",
    "a signal to all": "import os; os.kill(-1, 9)",
    "memory": "bytearray(1 << 30)",
    "a large file": "open('x', 'wb').write(bytes(1 << 25))",  # Python ignores SIGXFSZ: an OSError
    "its parent's limits": "import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (9, 9))",
    "a mount": "import ctypes, os\nif ctypes.CDLL(None).umount2(b'/proc', 2): raise OSError",
    "a tracer": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise OSError",
    "a namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "io_uring": "import ctypes\nif ctypes.CDLL(None).syscall(425, 1, bytes(120)) < 0: raise OSError",
}


@pytest.mark.parametrize("what", REACH)
def test_out_of_reach(what):
    body = "".join(f"    {line}\n" for line in REACH[what].splitlines())
    code = f"try:\n{body}except BaseException as error:\n    print('refused')\nelse:\n    print('reached')\n"
    assert _run(code, {}, Limits(5, 256), 1).stdout == "refused\n"
    assert not Path("/tmp/sentinel").exists()


def test_its_own_directory_and_ordinary_libraries_are_within_reach():
    code = (
        "import os, tempfile, collections, heapq, math, random, itertools, functools, resource, json\n"
        "open('x', 'w').write('hi'); assert open('x').read() == 'hi'; os.remove('x')\n"
        "tempfile.TemporaryFile(dir='.').write(b'x')\n"
        "assert resource.getrlimit(resource.RLIMIT_AS)[0] == 256 << 20\n"
        "assert not [k for k in os.environ if 'KEY' in k or 'TOKEN' in k or k == 'HOME']\n"
        "print('fine')\n"
    )
    os.environ["MINIVERL_TEST_TOKEN"] = "secret"
    try:
        assert _run(code, {}, Limits(5, 256), 1).stdout == "fine\n"
    finally:
        del os.environ["MINIVERL_TEST_TOKEN"]


REFUSED = f"""
import struct, sys
sys.path.insert(0, {str(Path(isolation.__file__).parent)!r})
import isolation
# A kernel without these system calls: a filter that answers ENOSYS.
program = [isolation._load(0)]
for number in map(int, sys.argv[2].split(",")):
    program += [isolation._jump(0x15, number, 0, 1), isolation._return(0x00050000 | 38)]
program.append(isolation._return(0x7FFF0000))
import ctypes
code = ctypes.create_string_buffer(b"".join(program))
isolation.libc.prctl(38, 1, 0, 0, 0)
filters = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
assert isolation.libc.prctl(22, 2, filters, 0, 0) == 0
try:
    readable = ["/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix]
    isolation.isolate(sys.argv[1], readable, 1 << 30, 5, 1 << 20)
except isolation.NoIsolation as error:
    print("not isolated:", error)
    sys.exit()
for path, mode in (("/tmp/sentinel", "w"), ("/proc/1/environ", "r"), ("/proc/self/maps", "r")):
    try:
        open(path, mode)
        print("reached")
    except OSError:
        pass
open(sys.argv[1] + "/x", "w").write("hi")
print("isolated")
"""
UNSHARE, LANDLOCK = "272", "444"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of the calls are x86_64's")
@pytest.mark.parametrize(
    ("without", "outcome"),
    [
        (UNSHARE, "isolated\n"),
        (LANDLOCK, "isolated\n"),
        (f"{LANDLOCK},{UNSHARE}", "not isolated: files cannot be protected"),
        (f"{LANDLOCK},442", "not isolated: files cannot be protected"),
        ("126", "not isolated: capset was refused"),
    ],
)
def test_one_layer_may_be_missing_but_not_all(without, outcome, tmp_path):
    done = subprocess.run(
        [sys.executable, "-I", "-c", REFUSED, str(tmp_path), without],
        capture_output=True, text=True, timeout=60, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.startswith(outcome), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("assert add(1, 2) == 3", "its answer must be JSON like"),
        ("[1]", "its answer must be JSON like"),
        ('{"inputs": ["1"], "outputs": []}', "as many outputs as inputs"),
        ('{"inputs": [], "outputs": []}', "at least one"),
        ('{"inputs": [1], "outputs": [1], "fn_name": "f"}', "must each be a list"),
        ('{"inputs": [[1]], "outputs": [1]}', "must each be a str"),
    ],
)
def test_tests_that_cannot_be_read_are_no_wrong_response(answer, why):
    with pytest.raises(ValueError, match=f"sample s: .*{why}"):
        code_tests(Sample("s", "", "print(1)", answer))


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)", "print(1)"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\nno:\n```Python\nb\n```\nprints\n```\n1\n```", "b\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\nunfinished", "```python\nunfinished"),
    ],
)
def test_which_code_is_run(response, code):
    assert code_of(response) == code


def test_it_runs_in_the_pool():
    right, wrong = sample("def add(a, b): return a + b", ADD), sample("def add(a, b): return a", ADD)
    with RewardPool({"code": Function("code_tests", {"timeout_s": 1.0})}, 2, 10.0) as pool:
        found = pool.score([Call("code", s) for s in (right, wrong, Sample("s", "", "x", "no tests"))])
    assert [v.score for v in found] == [1.0, 0.0, None]
