"""The entry: compose (Hydra) → validate → plan → build → fit. `python -m miniverl.main +experiment=NAME
key=value …`

Exit status: 0 done · 2 a bad request, nothing was started · 1 a run that failed · 130 interrupted. What a
setting means is `config`'s, how a tree becomes a Config `config_io`'s, what happens in a run the
controller's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miniverl.config import Config, ConfigError, RunError
from miniverl.config_io import KEYS, config_from_dict, defaults, find_key, nearest_word, put

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# torch, Hydra, rich and the controller are imported where they are needed: `--help` answers in well under a
# second.

CONF = Path(__file__).parent / "conf"
COMMAND = "python -m miniverl.main"


@dataclass(frozen=True)
class Request:
    """The command line, sorted by what Hydra composes and what is set afterwards."""

    experiment: str
    groups: dict[str, str] = field(default_factory=dict)
    """Group → option, e.g. {"model": "demo"}."""
    settings: list[tuple[str, Any]] = field(default_factory=list)
    """Dotted key and value, in order; the later one wins."""
    removals: list[str] = field(default_factory=list)
    """Dotted keys inside free mappings (`~extra.note`)."""


def options(group: str) -> list[str]:
    """The names that a config group offers."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def groups() -> list[str]:
    """The config groups that have options, `experiment` aside."""
    return sorted(path.name for path in CONF.iterdir() if path.name != "experiment" and options(path.name))


def compose(arguments: Sequence[str]) -> Config:
    """The validated Config of a command line such as `["+experiment=gkd_demo", "trainer.steps=5"]`.

    Raises ConfigError, one paragraph, for whatever cannot be honoured.
    """
    return config_from_dict(compose_tree(read_request(arguments)))


def compose_tree(request: Request) -> dict[str, Any]:
    """Defaults, groups, experiment and settings laid over each other: plain data, keys checked, values not
    yet."""
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="base", node=defaults())
    choices = [f"{group}={option}" for group, option in request.groups.items()]
    if request.experiment:
        choices.append(f"+experiment={request.experiment}")
    try:
        with initialize_config_dir(str(CONF.absolute()), version_base="1.3"):
            composed = hydra_compose("config", choices)
        tree: dict[str, Any] = {"experiment": request.experiment}
        for key, value in _items(OmegaConf.to_container(composed)):
            if key != "experiment":
                put(tree, key, value)
        for key, value in request.settings:
            put(tree, key, value)
        for key in request.removals:
            _remove(tree, key)
        config = OmegaConf.create(tree)
        for key in sorted(OmegaConf.missing_keys(config)):
            raise ConfigError(f"{key}=??? stands for a value that you must give: {key}=VALUE.")
        resolved = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        asked = " ".join([*choices, *(f"{key}={value}" for key, value in request.settings)])
        raise ConfigError(f"{asked}: {_first_line(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{' '.join(choices)}: a file of conf/ is not YAML: "
                          f"{' '.join(str(error).split())}") from None
    return dict(_items(resolved))


def read_request(arguments: Sequence[str]) -> Request:
    """Sort the arguments. Raises ConfigError for what is no `key=value`, and for every misuse of `+`, `++`
    and `~`."""
    experiment = ""
    chosen: dict[str, str] = {}
    settings: list[tuple[str, Any]] = []
    removals: list[str] = []
    for argument in arguments:
        override = _parse(argument)
        key = override.key_or_group
        if key == "experiment":
            experiment = _read_experiment(override, experiment)
        elif override.is_delete():
            removals.append(_deletable(argument, key))
        elif key in groups() and not isinstance(override.value(), dict):
            _refuse_prefix(override)
            chosen[key] = _option(key, override.value())
        else:
            known = find_key(key, override.value())
            if known is KEYS.get(key) and not known.free:
                _refuse_prefix(override)
            settings.append((key, override.value()))
    return Request(experiment, chosen, settings, removals)


def _parse(argument: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if argument.startswith("-"):
        raise ConfigError(f"{argument}: there is no such option; the only one is --help. Settings are "
                          "key=value.")
    if "=" not in argument and not argument.startswith("~"):
        near = nearest_word(argument, options("experiment"))
        hint = f"Did you mean +experiment={near}?" if near else "--help lists them."
        raise ConfigError(f"{argument}: settings are written key=value. {hint}")
    try:
        (override,) = OverridesParser.create().parse_overrides([argument])
    except HydraException as error:
        raise ConfigError(f"{argument}: cannot be read as key=value ({_first_line(error)}). Put text that "
                          "holds any of []{}(),:=\\'\" in quotes, and the whole argument in quotes for the "
                          "shell: 'extra.note=\"a, b\"'.") from None
    if override.is_sweep_override():
        raise ConfigError(f"{argument}: asks for several runs, but a command is one run. A list is written "
                          f"{override.key_or_group}=[a,b]; text with a comma needs quotes.")
    if override.package is not None:
        raise ConfigError(f"{argument}: `@` places nothing here; write {override.key_or_group}=….")
    return override


def _read_experiment(override: Override, already: str) -> str:
    value = override.value()
    if not override.is_add() or override.is_force_add() or not isinstance(value, str):
        raise ConfigError(f"{override.input_line}: an experiment is chosen with +experiment=NAME. "
                          f"There are {', '.join(options('experiment'))}.")
    if already:
        raise ConfigError(f"{override.input_line}: +experiment={already} is chosen already, and a run has "
                          "one.")
    return _option("experiment", value)


def _option(group: str, value: object) -> str:
    """The option, if the group offers it."""
    offered = options(group)
    if value not in offered:
        name = "null" if value is None else str(value)
        near = nearest_word(name, offered)
        raise ConfigError(f"{group}={name}: there is no such {group}. "
                          f"{f'The nearest is {near}; there' if near else 'There'} are {', '.join(offered)}.")
    return str(value)


def _refuse_prefix(override: Override) -> None:
    if override.is_add() or override.is_force_add():
        argument = str(override.input_line)
        raise ConfigError(f"{argument}: {override.key_or_group} exists already; write "
                          f"{argument.lstrip('+')}.")


def _deletable(argument: str, key: str) -> str:
    holder = key.rpartition(".")[0]
    if find_key(key, "") is KEYS.get(key):
        raise ConfigError(f"{argument}: a setting cannot be taken away, only changed: {key}=VALUE. `~` drops "
                          "entries of your own, as in ~extra.note.")
    if not holder:
        raise ConfigError(f"{argument}: nothing to drop.")
    return key


def _remove(tree: dict[str, Any], key: str) -> None:
    *path, last = key.split(".")
    node: Any = tree
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        raise ConfigError(f"~{key}: there is no such entry to drop.")
    del node[last]


def _items(tree: object) -> Iterable[tuple[str, Any]]:
    if not isinstance(tree, dict):
        raise TypeError(f"a composed configuration is a mapping, not {type(tree).__name__}")
    return [(str(key), value) for key, value in tree.items()]


def _first_line(error: Exception) -> str:
    """The sentence of a message; what Hydra and OmegaConf put below it are pointers to their own pages."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def experiments() -> list[tuple[str, str, str]]:
    """Name, summary and hardware of every experiment."""
    import yaml

    rows = []
    for name in options("experiment"):
        try:
            content = yaml.safe_load((CONF / "experiment" / f"{name}.yaml").read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigError(f"conf/experiment/{name}.yaml is not YAML: "
                              f"{' '.join(str(error).split())}") from None
        rows.append((name, content.get("summary", ""), content.get("hardware", "")))
    return rows


def print_experiments() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Experiments", title_justify="left")
    table.add_column("+experiment=", no_wrap=True)
    table.add_column("what it does")
    table.add_column("wants")
    for row in experiments():
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"Start one: {COMMAND} +experiment=gkd_demo        All settings: {COMMAND} --help")


def print_help() -> None:
    print(f"""Usage: {COMMAND} +experiment=NAME [group=option …] [key=value …]

Examples
  {COMMAND} +experiment=gkd_demo
  {COMMAND} +experiment=gkd_demo trainer.steps=50 placement=local
  {COMMAND} +experiment=gkd_4080 plan_only=true

Groups (group=option)""")
    for group in groups():
        print(f"  {group:10} {' | '.join(options(group))}")
    print("\nSettings (key=value); their meaning stands beside them in miniverl/config.py")
    for section in [name for name, key in KEYS.items() if key.section and "." not in name]:
        names = [name.partition(".")[2] for name, key in KEYS.items()
                 if name.startswith(section + ".") and not key.section]
        print(f"  {section:10} {', '.join(names)}")
    print("""  top level  plan_only, extra.ANY (your own notes: kept with the run, read by nothing)
  A section that is off (null) is turned on by setting a key of it, and off again by section=null.

Exit status: 0 done, 2 bad request (nothing was started), 1 the run failed, 130 interrupted
""")
    print_experiments()


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; the exit status."""
    if "--help" in arguments or "-h" in arguments:
        print_help()
        return 0
    if not any(argument.lstrip("+").startswith("experiment=") for argument in arguments):
        print_experiments()
        return 2
    config = compose(arguments)

    from miniverl.controller import build
    from miniverl.controller.plan import make_plan

    plan = make_plan(config)
    if config.plan_only:
        print(plan.table())
        return 0
    result = build.run(config, plan)
    print(f"RESULT {json.dumps(result)}", flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`run`, with the errors that a user can cause told in one paragraph instead of a traceback."""
    try:
        return run(sys.argv[1:] if arguments is None else arguments)
    except ConfigError as error:
        print(f"miniverl: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"miniverl: the run failed: {error} If it had saved a checkpoint, the same command goes on "
              "from it "
              "(trainer.resume=auto).", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("miniverl: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
