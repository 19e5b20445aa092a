"""Make hosts on a slow link: network namespaces, each with one rate-limited card.

The hosts' cards (veth pairs) meet at a bridge, which has its own namespace, so that nothing of the
machine's own network changes.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PREFIX = "megahour-link"
CARD = "eth0"
COMMAND_LIMIT_S = 20
# A burst must hold the largest packet, 64 KiB on lo; a full queue drops, which TCP then repairs.
BURST_BYTES = 2**17
QUEUE_BYTES = 2**24


class NoHostsError(RuntimeError):
    """NoHostsError says what this machine refuses that the hosts need."""


@dataclass(frozen=True)
class Rates:
    """Rates holds Mbit/s of a host's card in each direction, and of its ranks' exchanges."""

    between_mbit: float
    within_mbit: float


@dataclass(frozen=True)
class Host:
    """Host is one network namespace, and the address of its card."""

    namespace: str
    address: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on this host, which has its own name."""
        renamed = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.namespace]
        return ["ip", "netns", "exec", self.namespace, *renamed, *command]


@contextmanager
def running_hosts(num_hosts: int, rates: Rates | None) -> Iterator[list[Host]]:
    """Start hosts that reach one another, at unlimited speed where there are no `rates`.

    Removes first what a killed run has left. Raises NoHostsError.
    """
    remove_leftovers()
    own = f"{PREFIX}-{os.getpid()}"
    hosts = [Host(f"{own}-{number}", f"10.77.0.{number + 1}") for number in range(num_hosts)]
    try:
        _start_switch(f"{own}-switch")
        for number, host in enumerate(hosts):
            _start_host(host, f"{own}-switch", f"port{number}", rates)
        yield hosts
    finally:
        _remove([*(host.namespace for host in hosts), f"{own}-switch"])


def remove_leftovers() -> None:
    """Remove the hosts of runs whose process has ended."""
    names = [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]
    ours = [name for name in names if name.startswith(f"{PREFIX}-")]
    _remove([name for name in ours if not _is_alive(int(name.split("-")[2]))])


def _start_switch(switch: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")


def _start_host(host: Host, switch: str, port: str, rates: Rates | None) -> None:
    name = host.namespace
    _run("ip", "netns", "add", name)
    peer = ("peer", "name", port, "netns", switch)
    _run("ip", "link", "add", CARD, "netns", name, "type", "veth", *peer)
    _run("ip", "-n", name, "address", "add", f"{host.address}/24", "dev", CARD)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
    for namespace, device in ((name, "lo"), (name, CARD), (switch, port)):
        _run("ip", "-n", namespace, "link", "set", device, "up")
    if rates is not None:
        _limit(name, CARD, rates.between_mbit)
        _limit(switch, port, rates.between_mbit)
        _limit(name, "lo", rates.within_mbit)


def _limit(namespace: str, device: str, mbit: float) -> None:
    """Limit what leaves by `device`, with a token bucket; this kernel may have no netem."""
    bucket = ("rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _remove(namespaces: Sequence[str]) -> None:
    """Kill the processes in the namespaces, and delete these with their devices."""
    for name in namespaces:
        if (Path("/run/netns") / name).exists():
            for pid in _run("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            _run("ip", "netns", "del", name)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie: killed, but not yet waited for


def _run(*command: str) -> str:
    # Debian keeps ip and tc where only root's PATH leads.
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_LIMIT_S,
            env={**os.environ, "PATH": path},
        )
    except FileNotFoundError as error:
        raise NoHostsError(f"{command[0]} is not installed: need ip and tc (iproute2)") from error
    if done.returncode != 0:
        raise NoHostsError(
            f"{' '.join(command)}: {done.stderr.strip()}. Need root (CAP_SYS_ADMIN and "
            "CAP_NET_ADMIN) and a kernel with network namespaces, veth, bridge and tbf"
        )
    return done.stdout
