"""Where workers live: in this process, or in Ray actors. The home of `import ray`.

A pool hands out hosts and carries calls to them; it knows roles only as names. Every wait has a deadline
that names what was waited for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import miniverl
from miniverl.config import ConfigError, PlacementConfig, RunError
from miniverl.workers.host import Host

AUTH_TOKEN = Path("~/.ray/auth_token")


class Pool(Protocol):
    size: int
    """Hosts."""

    def build(self, role: str, worker: Callable[..., Any], *args: Any) -> None:
        """Make a worker of `role` in every host."""
        ...

    def drop(self, role: str) -> None:
        """Let go of the workers of `role` and their memory."""
        ...

    def call(
        self, host: int, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Start a call; returns a handle for `wait`."""
        ...

    def wait(self, handles: Sequence[Any], what: str) -> list[Any]:
        """Results in the order of the handles."""
        ...

    def peak_memory_bytes(self) -> list[int]: ...

    def close(self) -> None: ...


class LocalPool:
    """Hosts in this process: no Ray, calls run at once, a debugger steps into them."""

    def __init__(self, placement: PlacementConfig, device: str, size: int = 1) -> None:
        self.size = size
        self.hosts = [Host(placement.threads, device) for _ in range(size)]

    def build(self, role: str, worker: Callable[..., Any], *args: Any) -> None:
        for host in self.hosts:
            host.build(role, worker, args, {})

    def drop(self, role: str) -> None:
        for host in self.hosts:
            host.drop(role)

    def call(
        self, host: int, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return self.hosts[host].call(role, method, args, dict(kwargs))

    def wait(self, handles: Sequence[Any], what: str) -> list[Any]:
        return list(handles)

    def peak_memory_bytes(self) -> list[int]:
        return [host.peak_memory_bytes() for host in self.hosts]

    def close(self) -> None:
        for host in self.hosts:
            host.workers.clear()


class RayPool:
    """One Ray actor per host, named by the roles it holds, on a Ray that this process starts and ends.

    Raises:
        ConfigError: this machine cannot give what is asked, with wanted and available.
        RunError: Ray did not start, or a host was not placed, within `placement.wait_s`.
    """

    def __init__(self, placement: PlacementConfig, device: str, name: str, roles: Sequence[str]) -> None:
        self.size = 1
        self.placement = placement
        self.name = "+".join(roles)
        self._closing = threading.Event()
        if placement.num_cpus > (cores := os.cpu_count() or 1):
            raise ConfigError(
                f"placement.num_cpus={placement.num_cpus} is more than this machine's {cores} cores."
            )
        self.ray, self.dashboard_url = _start_ray(placement, name, self._closing)
        wanted = {"CPU": float(placement.num_cpus)} | ({"GPU": 1.0} if device == "cuda" else {})
        available = self.ray.cluster_resources()
        for resource, amount in wanted.items():
            if available.get(resource, 0.0) < amount:
                self.close()
                raise ConfigError(
                    f"placement.kind={placement.kind}, placement.num_cpus={placement.num_cpus} wants "
                    f"{amount:g} {resource}, Ray has {available.get(resource, 0.0):g} here. Use "
                    "placement=local, or placement.device=cpu."
                )
        try:
            self.hosts = [
                self.ray.remote(Host)
                .options(
                    name=self.name,
                    num_cpus=placement.num_cpus,
                    num_gpus=1 if device == "cuda" else 0,
                    max_restarts=0,
                    runtime_env={"env_vars": _worker_environment(placement)},
                )
                .remote(placement.threads, device)
            ]
            self._get(
                [host.process_id.remote() for host in self.hosts], placement.wait_s, "a Ray host to be placed"
            )
        except BaseException:
            self.close()
            raise

    def build(self, role: str, worker: Callable[..., Any], *args: Any) -> None:
        self.wait([host.build.remote(role, worker, args, {}) for host in self.hosts], f"{role} to be built")

    def drop(self, role: str) -> None:
        self.wait([host.drop.remote(role) for host in self.hosts], f"{role} to be let go")

    def call(
        self, host: int, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return self.hosts[host].call.options(name=f"{role}.{method}").remote(role, method, args, dict(kwargs))

    def wait(self, handles: Sequence[Any], what: str) -> list[Any]:
        return self._get(list(handles), self.placement.call_timeout_s, what)

    def peak_memory_bytes(self) -> list[int]:
        return self.wait([host.peak_memory_bytes.remote() for host in self.hosts], "memory figures")

    def close(self) -> None:
        self.ray.shutdown()
        self._closing.set()

    def _get(self, handles: list[Any], timeout_s: float, what: str) -> list[Any]:
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(handles, timeout=timeout_s)
        except exceptions.GetTimeoutError:
            raise RunError(
                f"waited {timeout_s:g} s for {what} and gave up (placement.wait_s, "
                "placement.call_timeout_s set the limits)."
            ) from None
        except exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (ConfigError, RunError, OSError)):
                raise cause from None
            raise
        except exceptions.RayActorError as error:
            raise RunError(
                f"the Ray host {self.name} died during {what}: {_first_cause(str(error))}"
            ) from None


def _start_ray(
    placement: PlacementConfig, name: str, closing: threading.Event
) -> tuple[Any, str | None]:
    """A Ray of our own, never somebody else's, within `placement.wait_s`; the module and the dashboard's
    address. `closing` says that it is no longer needed."""
    ray = _import_ray()
    failure: list[BaseException] = []
    started: list[Any] = []
    answered = threading.Event()

    def start() -> None:
        try:
            started.append(
                ray.init(
                    address="local",
                    namespace=name,
                    num_cpus=os.cpu_count() or 1,
                    include_dashboard=placement.dashboard,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            )
        except (RuntimeError, OSError, ValueError, ConnectionError, TimeoutError) as error:
            failure.append(error)
        finally:
            answered.set()
        # The kernel kills Ray's processes when the thread that started them ends, so it stays until close().
        closing.wait()

    threading.Thread(target=start, daemon=True).start()
    answered.wait(placement.wait_s)
    if not started:
        closing.set()
        why = f"{failure[0]}" if failure else f"no answer within placement.wait_s={placement.wait_s:g} s"
        has_token = AUTH_TOKEN.expanduser().exists()
        token = " ~/.ray/auth_token exists: try RAY_AUTH_MODE=disabled." if has_token else ""
        raise RunError(
            f"Ray did not start: {why}.{token} placement=local runs the same experiment without Ray."
        )
    url = started[0].dashboard_url
    return ray, f"http://{url}" if url else None


def _import_ray() -> Any:
    """Ray, with the surroundings that it reads when it is imported; what a user has set is left alone."""
    # Ray switches token authentication on as soon as a token file exists, and then fails with a bare "failed
    # to connect". Its workers run at niceness 15, which on a desktop starves the run of whatever else is
    # open.
    ours = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    for name, value in ours.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.exceptions

    logging.getLogger("ray").setLevel(logging.ERROR)  # it would remark that a thread starts it
    return ray


def _worker_environment(placement: PlacementConfig) -> dict[str, str]:
    root = str(Path(miniverl.__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "OMP_NUM_THREADS": str(placement.threads),
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0"),
    }


def _first_cause(text: str) -> str:
    """The sentence of Ray's message that says why, without its boilerplate."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [
        line
        for line in lines
        if line.lower().startswith(("the actor died", "worker exit", "the actor is dead"))
    ]
    return (named or lines)[-1].partition(" Some common causes")[0]
