"""The house: rooms at the top level, installed inside `miniverl`, whole in every way of getting there."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("conf", "controller", "workers")
EVERYTHING = ("miniverl", *ROOMS, "requirements", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE")
SHOW = (
    "import json, sys, miniverl.conf, miniverl.controller, miniverl.workers.rollout, miniverl.main as "
    "main;"
    "print(json.dumps([main.__file__, main.options('experiment'), "
    "sorted({'conf', 'controller', 'workers'}"
    " & set(sys.modules)), main.compose(['+experiment=gkd_quick']).experiment]))"
)


def do(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as cloned."""
    tree = tmp_path_factory.mktemp("clone") / "tree"
    tree.mkdir()
    for name in EVERYTHING:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


def copy(clone: Path, target: Path, links: bool) -> Path:
    """A tree to build in: the clone, or what an archive that dropped the links leaves of it."""
    shutil.copytree(clone, target, symlinks=True)
    if not links:
        for room in ROOMS:
            (target / "miniverl" / room).unlink()
    return target


def pip(*arguments: str | Path, cwd: Path) -> None:
    do(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def sources(clone: Path) -> set[str]:
    """Every file of the rooms, by the name that it has when installed."""
    names = set()
    for room in ("miniverl", *ROOMS):
        for path in (clone / room).rglob("*"):
            inside = path.relative_to(clone).as_posix()
            through_link = room == "miniverl" and path.relative_to(clone / room).parts[0] in ROOMS
            if path.is_file() and not through_link:
                names.add(inside if room == "miniverl" else f"miniverl/{inside}")
    return names


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built the hard way: from an archive without the links."""
    work = tmp_path_factory.mktemp("wheel")
    tree = copy(clone, work / "tree", links=False)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work, tree, cwd=work)
    (built,) = work.glob("*.whl")
    return built


def names_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_links_are_relative_and_point_to_the_rooms() -> None:
    for room in ROOMS:
        link = ROOT / "miniverl" / room
        assert link.is_symlink()
        assert os.readlink(link) == f"../{room}"
        assert (ROOT / room / "__init__.py").is_file()


def test_wheel_holds_every_file_and_only_miniverl_at_the_top(clone: Path, wheel: Path) -> None:
    everything = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in everything}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"miniverl"}
    assert names_in(wheel) == sources(clone)
    assert "miniverl/conf/experiment/gkd_demo.yaml" in everything
    assert wheel.name.startswith("miniverl-0.1.0-")


def test_sdist_and_wheel_from_a_clone_are_the_same(clone: Path, wheel: Path, tmp_path: Path) -> None:
    tree = copy(clone, tmp_path / "tree", links=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    do(*build, "--outdir", tmp_path, tree, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    assert names_in(built) == names_in(wheel)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "controller/__init__.py", "conf/config.yaml", "requirements/core.txt"} <= inside
    doubled = tuple(f"miniverl/{room}/" for room in ROOMS)
    assert not [name for name in inside if name.startswith(doubled)]


def assert_serves(shown: str, home: Path) -> None:
    file, experiments, top_level, composed = json.loads(shown)
    assert Path(file).is_relative_to(home)
    assert experiments == sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
    assert top_level == [], "a room imported by its folder name would have second classes"
    assert composed == "gkd_quick"


def test_runs_from_the_root_without_installing() -> None:
    assert_serves(do(sys.executable, "-c", SHOW, cwd=ROOT), ROOT)


def test_runs_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "site"
    pip("install", "--no-deps", "--no-compile", "--target", home, wheel, cwd=tmp_path)
    assert {path.name for path in home.iterdir() if not path.name.endswith(".dist-info")} == {
        "miniverl",
        "bin",
    }
    assert_serves(do(sys.executable, "-c", SHOW, cwd=tmp_path, PYTHONPATH=str(home)), home)


def test_runs_from_a_zip(clone: Path, tmp_path: Path) -> None:
    copy(clone, tmp_path / "tree", links=False)
    archive = shutil.make_archive(str(tmp_path / "miniverl-main"), "zip", tmp_path / "tree")
    home = tmp_path / "site"
    pip(
        "install",
        "--no-deps",
        "--no-compile",
        "--no-build-isolation",
        "--target",
        home,
        archive,
        cwd=tmp_path,
    )
    assert_serves(do(sys.executable, "-c", SHOW, cwd=tmp_path, PYTHONPATH=str(home)), home)


@pytest.mark.parametrize("mode", ["lenient", "compat", "strict"])
def test_runs_editable(mode: str, clone: Path, tmp_path: Path) -> None:
    tree = copy(clone, tmp_path / "tree", links=True)
    pip(
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--ignore-installed",
        "--prefix",
        tmp_path / "prefix",
        "--config-settings",
        f"editable_mode={mode}",
        "--editable",
        tree,
        cwd=tmp_path,
    )
    (site,) = (tmp_path / "prefix").rglob("site-packages")
    script = f"import site; site.addsitedir({str(site)!r}); {SHOW}"
    assert_serves(do(sys.executable, "-c", script, cwd=tmp_path), tree)


def test_runs_in_a_ray_working_dir(clone: Path, tmp_path: Path) -> None:
    tree = copy(clone, tmp_path / "tree", links=True)
    script = f"""
import ray, subprocess, sys
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False,
         runtime_env={{"working_dir": {str(tree)!r}}})
@ray.remote
def show():
    return subprocess.check_output([sys.executable, "-c", {SHOW!r}], text=True)
print(ray.get(show.remote(), timeout=120), end="")
"""
    shown = do(sys.executable, "-W", "ignore", "-c", script, cwd=tmp_path)
    file = Path(json.loads(shown)[0])
    assert "working_dir_files" in file.parts
    assert_serves(shown, file.parents[1])


def test_torch_check_sees_cuda_packages_and_passes_the_cpu_build() -> None:
    spec = importlib.util.spec_from_file_location("check_torch", ROOT / "requirements" / "check_torch.py")
    assert spec is not None
    assert spec.loader is not None
    check_torch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_torch)
    cpu = ["filelock", "sympy>=1.13.3", 'optree>=0.13.0; extra == "optree"']
    cuda = ['nvidia-cudnn-cu13==9.1; platform_system == "Linux"', "triton==3.8.0", "cuda-bindings<14"]
    assert check_torch.cuda_packages(cpu) == []
    assert check_torch.cuda_packages([*cpu, *cuda]) == cuda


def test_the_lock_pins_everything_once() -> None:
    pins: dict[str, str] = {}
    for name in ("core.txt", "dev.txt", "nf4.txt", "rewards.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if line.startswith("#"):
                continue
            package, _, version = line.partition("==")
            assert version, f"{line} is not pinned"
            assert "+" not in version, f"{line} names one build; the same lock must serve CPU and CUDA"
            assert package.lower() not in pins
            pins[package.lower()] = version
    assert pins["torch"] == "2.13.0"
    assert pins["transformers"] == "5.19.0"
    assert pins["ray[default]"] == "2.60.0"
