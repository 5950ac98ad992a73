"""Runs docker-compose.yml for real, without a Docker engine: python -m scripts.compose_e2e.

Builds the images, brings the stack up with the second cluster of its profile `remote`, streams an
answer, sends a long prompt to the second cluster, kills a decode container in the middle of a
stream and demands that the stream goes on with the same text, then takes the stack down and checks
that nothing is left but net.ipv4.ip_forward and netavark's empty iptables chains, which
podman keeps. Needs root, podman, runc and debootstrap; images stay in ~/.cache/kvmesh/containers
for the next run.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from scripts.compose_client import Answer, CheckError, Client, check, check_answer
from scripts.local_containers import (
    BASE_IMAGE,
    CommandError,
    ContainerHost,
    compose_program,
    missing_requirements,
    run,
)

ROOT = Path(__file__).resolve().parent.parent
COMPOSE_FILE = ROOT / "docker-compose.yml"
PROJECT = "kvmesh-e2e"
PROJECT_LABEL = f"com.docker.compose.project={PROJECT}"
CONTROL_PLANE = ("gateway", "scheduler", "kvmanager")
DECODE_WORKERS = ("decode-0", "decode-1")
PROFILE = "remote"
REMOTE_WORKER = "remote-0"
LONG_PROMPT = " ".join(f"import module{n}" for n in range(400))
USER_ID = "10001"

BUILD_TIMEOUT_S = 1800.0
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 120.0
_POLL_S = 0.5


@contextmanager
def step(text: str) -> Iterator[None]:
    """Says what goes on, and how long it took."""
    print(f"{text} ...", flush=True)
    started_s = time.monotonic()
    yield
    print(f"    {time.monotonic() - started_s:.1f} s", flush=True)


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Asks again and again.

    Raises:
        CheckError: the condition did not hold in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        check(time.monotonic() < deadline_s, f"{what}: not after {timeout_s:.0f} s")
        time.sleep(_POLL_S)


# --- the stack ---


class Stack:
    """The services of docker-compose.yml under a project name of their own.

    Args:
        program: path of podman-compose.
    """

    def __init__(self, host: ContainerHost, program: str) -> None:
        self._host = host
        self._program = program
        every: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
        services = {
            name: each for name, each in every.items() if PROFILE in each.get("profiles", [PROFILE])
        }
        self.services = tuple(services)
        # The others have one thing to do, and end.
        self.lasting = tuple(name for name, each in services.items() if "healthcheck" in each)
        self.images = {
            name: str(service["image"]) for name, service in services.items() if "build" in service
        }

    def compose(self, *arguments: str, timeout_s: float) -> str:
        """Runs podman-compose on the project."""
        env = self._host.environment(
            {
                "PYTHON_IMAGE": BASE_IMAGE,
                "KVMESH_REDIS_IMAGE": BASE_IMAGE,
                "KVMESH_PORT": "127.0.0.1:",  # any free port
                "KVMESH_SECOND_PORT": "127.0.0.1:",
                "KVMESH_REMOTE_CLUSTER": "remote",
            }
        )
        program = (self._program, "--in-pod", "false", "--profile", PROFILE, "-p", PROJECT)
        return run([*program, "-f", COMPOSE_FILE, *arguments], timeout_s, env=env, cwd=ROOT)

    def build(self) -> None:
        """Builds the image of each target; layers that did not change come from the cache."""
        flags = shlex.join(self._host.build_arguments())
        for image in sorted(set(self.images.values())):
            service = next(name for name, its in self.images.items() if its == image)
            with step(f"build {image}"):
                self.compose(
                    f"--podman-build-args={flags}", "build", service, timeout_s=BUILD_TIMEOUT_S
                )

    def up(self) -> None:
        """Starts all containers."""
        self.compose("up", "--detach", "--no-build", timeout_s=300)

    def stop(self) -> None:
        """Asks all containers to finish and waits for them."""
        self.compose("stop", timeout_s=STOP_TIMEOUT_S)

    def down(self) -> None:
        """Removes the containers and the network, whatever state they are in."""
        self.compose("down", "--volumes", "--timeout", "2", timeout_s=STOP_TIMEOUT_S)

    def container(self, service: str) -> str:
        """Name of a service's container."""
        found = self._host.podman(
            *("ps", "--all", "--format", "{{.Names}}"),
            *("--filter", f"label={PROJECT_LABEL}"),
            *("--filter", f"label=com.docker.compose.service={service}"),
        )
        check(bool(found), f"{service} has no container")
        return found

    def address(self) -> tuple[str, int]:
        """Where the gateway's HTTP port is published."""
        published = self._host.podman("port", self.container("gateway"), "8000/tcp")
        name, _, port = published.splitlines()[0].rpartition(":")
        return name, int(port)

    def is_healthy(self, service: str) -> bool:
        """Runs the service's own health check once."""
        try:
            self._host.podman("healthcheck", "run", self.container(service))
        except CommandError:
            return False
        return True

    def state(self, service: str, template: str) -> str:
        """A field of `podman inspect`."""
        return self._host.podman("inspect", "--format", template, self.container(service))

    def logs(self, service: str) -> str:
        """The last lines that a service wrote."""
        name = self.container(service)
        env = self._host.environment({})
        return run(["sh", "-c", 'podman logs --tail 20 "$0" 2>&1', name], 30, env=env)


# --- what is checked ---


def check_images(host: ContainerHost, stack: Stack) -> None:
    """No torch in the control plane's images."""
    probe = (
        "import importlib.util as u; assert not [m for m in ('torch', 'triton') if u.find_spec(m)]"
    )
    for service in CONTROL_PLANE:
        image = stack.images[service]
        host.podman("run", "--rm", "--network=none", "--entrypoint=python", image, "-c", probe)


def check_running(host: ContainerHost, stack: Stack) -> None:
    """Every container is healthy and, if it is ours, has no rights."""
    for service in stack.lasting:
        wait_until(
            functools.partial(stack.is_healthy, service),
            f"health check of {service}",
            READY_TIMEOUT_S,
        )
    for service in stack.images:
        user = host.podman("exec", stack.container(service), "id", "-u")
        check(user == USER_ID, f"{service} runs as user {user}")


def check_move(host: ContainerHost, stack: Stack, client: Client, expected: Answer) -> str:
    """Kills the decode worker of a running stream; returns its name."""
    model, moves = client.model(), client.num_moves()

    def kill(answer: Answer) -> None:
        print(f"    {sum(answer.pieces)} tokens so far; kill {answer.worker}", flush=True)
        host.podman("kill", stack.container(answer.worker))

    answer = client.stream(model, during=kill)
    check_answer(answer)
    check(client.num_moves() > moves, "the stream was over before its worker died")
    check(answer.text == expected.text, "the moved stream has another text")
    return answer.worker


def check_offload(client: Client) -> None:
    """A long prompt is prefilled in the second cluster, and a short one is not."""
    long = client.placed(LONG_PROMPT)
    check(long.prefill == REMOTE_WORKER, f"a long prompt was prefilled by {long}")
    check(long.decision.startswith("long_prompt"), f"the long prompt's decision is {long}")
    short = client.placed("import os")
    check(short.prefill != REMOTE_WORKER, f"a short prompt was prefilled by {short}")


def check_return(host: ContainerHost, stack: Stack, client: Client, worker: str) -> str:
    """A killed worker takes work again when it is back; returns the other, killed in its place."""
    host.podman("start", stack.container(worker))
    wait_until(lambda: stack.is_healthy(worker), f"health check of {worker}", READY_TIMEOUT_S)
    other = next(name for name in DECODE_WORKERS if name != worker)
    host.podman("kill", stack.container(other))
    answer = client.stream(client.model())
    check_answer(answer)
    check(answer.worker == worker, f"{answer.worker} answered, {worker} should have")
    return other


def check_stop(stack: Stack, killed: str) -> None:
    """Every service that still runs drains and ends with exit code 0."""
    stack.stop()
    for service in stack.services:
        code = stack.state(service, "{{.State.ExitCode}}")
        check(service == killed or code == "0", f"{service} ended with exit code {code}")


def network_links() -> set[str]:
    """Names of the network interfaces of this machine."""
    return set(os.listdir("/sys/class/net"))


def check_clean(host: ContainerHost, links: set[str]) -> None:
    """No container, network or interface is left."""
    label = f"label={PROJECT_LABEL}"
    check(not host.podman("ps", "--all", "--quiet", "--filter", label), "a container is left")
    check(not host.podman("network", "ls", "--quiet", "--filter", label), "a network is left")
    left = sorted(network_links() - links)
    check(not left, f"network interfaces are left: {', '.join(left)}")


# --- the run ---


def prepare(host: ContainerHost, stack: Stack) -> None:
    """Images, and nothing left of a run that was cut off."""
    if not host.has_image(BASE_IMAGE):
        with step("make a Debian base image"):
            host.make_base_image()
    stack.down()
    stack.build()
    # What older builds left. The container of a build that was cut off keeps its layers.
    with suppress(CommandError):
        host.podman("image", "prune", "--force", timeout_s=120)
    for image in sorted({*stack.images.values(), BASE_IMAGE}):
        print(f"    {image}: {host.image_bytes(image) / 1e6:.0f} MB", flush=True)
    with step("control-plane images hold no torch"):
        check_images(host, stack)


def exercise(host: ContainerHost, stack: Stack) -> None:
    """All that is checked on a running stack."""
    with step("start the stack"):
        stack.up()
    client = Client(stack.address())
    with step("the gateway is ready"):
        wait_until(lambda: client.get("/ready")[0] == 200, "GET /ready", READY_TIMEOUT_S)
    with step("every health check passes, nobody is root"):
        check_running(host, stack)
    with step("an answer is streamed"):
        undisturbed = client.stream(client.model())
        check_answer(undisturbed)
    with step("a long prompt is prefilled in the second cluster"):
        check_offload(client)
    with step("a decode worker is killed and the stream goes on"):
        worker = check_move(host, stack, client, undisturbed)
    with step("the stack goes on without it"):
        again = client.stream(client.model())
        check_answer(again)
        check(again.text == undisturbed.text, "the next answer has another text")
    with step("it comes back and takes work"):
        killed = check_return(host, stack, client, worker)
    with step("all services stop in order"):
        check_stop(stack, killed)


def show_logs(stack: Stack) -> None:
    """What every service wrote last."""
    for service in stack.services:
        try:
            print(f"--- {service}\n{stack.logs(service)}", file=sys.stderr)
        except (CheckError, CommandError) as error:
            print(f"--- {service}: {error}", file=sys.stderr)


def exercise_and_clean(host: ContainerHost, stack: Stack) -> None:
    """Runs the checks and takes the stack down, however they end."""
    links = network_links()
    try:
        exercise(host, stack)
    except (CheckError, CommandError):
        show_logs(stack)
        raise
    finally:
        with step("take the stack down"):
            stack.down()
    check_clean(host, links)


def main() -> int:
    """Exit code 0 if all checks hold, 1 if one does not, 2 if this machine cannot run them."""
    program, missing = compose_program(), missing_requirements()
    for line in missing:
        print(f"compose_e2e: {line}", file=sys.stderr)
    if missing or program is None:
        return 2
    host = ContainerHost(Path.home() / ".cache" / "kvmesh" / "containers")
    stack = Stack(host, program)
    try:
        with host.locked():
            prepare(host, stack)
            exercise_and_clean(host, stack)
    except (CheckError, CommandError) as error:
        print(f"compose_e2e: {error}", file=sys.stderr)
        return 1
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
