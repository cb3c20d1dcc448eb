"""Packaging. The rooms lie at the top of the repository and are installed inside `miniverl`:
controller/ → miniverl.controller, workers/ → miniverl.workers, conf/ → miniverl.conf.

The symlinks inside miniverl/ serve whoever runs from the root without installing; the mapping below is what
every build uses, so an archive that dropped the links still installs whole. `tests/test_layout.py` proves
both.
"""

from setuptools import find_packages, setup

ROOMS = ("controller", "workers", "conf")
inside = {room: f"miniverl.{room}" for room in ROOMS}

through_links = [pattern for package in inside.values() for pattern in (package, f"{package}.*")]

ground = find_packages(include=["miniverl", "miniverl.*"], exclude=through_links)
rooms = [f"miniverl.{package}" for room in ROOMS for package in find_packages(include=[room, f"{room}.*"])]

setup(
    name="miniverl",
    version="0.1.0",
    description="Post-training of language models: one driver, groups of workers, a loop that fits a page",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=ground + rooms,
    package_dir={"miniverl": "miniverl", **{package: room for room, package in inside.items()}},
    package_data={
        "miniverl.conf": ["**/*.yaml", "**/*.json"],
        "miniverl.models": ["embedded/*/*.json", "embedded/*/*.safetensors", "embedded/*/*.jinja"],
        "miniverl.report": ["page/*.html.j2", "page/*.css", "page/*.js"],
    },
    include_package_data=False,
    zip_safe=False,
    entry_points={"console_scripts": ["miniverl = miniverl.main:main"]},
    # Ranges: what the code is written for. requirements/*.txt pin what it is tested with.
    install_requires=[
        "torch>=2.9",
        "ray[default]>=2.49",
        "transformers>=5,<6",
        "peft>=0.18",
        "tokenizers>=0.22",
        "safetensors>=0.6",
        "hydra-core>=1.3,<2",
        "omegaconf>=2.3,<3",
        "PyYAML>=6",
        "pydantic>=2.11,<3",
        "numpy>=2",
        "pyarrow>=20",
        "psutil>=6",
        "rich>=13",
        "Jinja2>=3.1",
        "matplotlib>=3.9",
        "tensorboard>=2.19",
    ],
    extras_require={
        "nf4": ["bitsandbytes>=0.48"],
        "rewards": ["math-verify[antlr4_9_3]>=0.9", "reasoning-gym>=0.1.25"],
        "dev": [
            "ruff",
            "pyright[nodejs]",
            "import-linter>=2.3",
            "pytest>=8.4",
            "pytest-xdist",
            "hypothesis",
            "build",
            "setuptools>=77",
            "wheel",
        ],
    },
)
