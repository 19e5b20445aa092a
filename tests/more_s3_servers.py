"""Run two more real S3 servers for tests: OpenStack Swift, and rclone's gateway to a folder.

Both come from wheels, in an environment of their own, which `make faults` makes.
"""

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.s3_server import CREDENTIALS, free_port

PROGRAMS = Path(__file__).parents[1] / ".venv-stores" / "bin"
START_LIMIT_S = 60.0
KEY_ID, SECRET = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]

SWIFT_SERVICES = ("account", "container", "object")
SWIFT_KEY_ID = f"test:{KEY_ID}"
"""Swift names the account, too."""

SWIFT = """\
[swift-hash]
swift_hash_path_suffix = tests
[storage-policy:0]
name = one
default = yes
"""
MAKE_RINGS = """
import sys
from swift.common.ring import RingBuilder
for name, port in zip(sys.argv[1::2], sys.argv[2::2]):
    builder = RingBuilder(part_power=4, replicas=1, min_part_hours=1)
    place = {"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "disk"}
    builder.add_dev({**place, "weight": 1.0})
    builder.rebalance()
    builder.get_ring().save(f"{name}.ring.gz")
"""
"""Write the rings by which Swift finds the one disk of each service."""
SERVICE = """\
[DEFAULT]
swift_dir = {folder}
devices = {folder}
mount_check = false
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
PROXY = """\
[DEFAULT]
swift_dir = {folder}
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
[pipeline:main]
pipeline = catch_errors cache s3api tempauth bulk slo proxy-server
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
[filter:s3api]
use = egg:swift#s3api
location = {region}
[filter:tempauth]
use = egg:swift#tempauth
user_{account} = {secret} .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
"""


@contextmanager
def running_swift() -> Iterator[str]:
    """Run Swift with one disk and no replicas; yield the endpoint URL of its S3 API."""
    ports = {name: free_port() for name in SWIFT_SERVICES}
    with TemporaryDirectory(prefix="swift-") as place:
        folder = Path(place)
        (folder / "disk").mkdir()
        (folder / "swift.conf").write_text(SWIFT)
        rings = [str(part) for each in ports.items() for part in each]
        command = [program("python"), "-c", MAKE_RINGS, *rings]
        subprocess.run(command, cwd=folder, check=True, timeout=START_LIMIT_S)
        commands = []
        for name, port in ports.items():
            config = folder / f"{name}.conf"
            config.write_text(SERVICE.format(folder=folder, port=port, name=name))
            commands.append((f"swift-{name}-server", str(config)))
        proxy_port, config = free_port(), folder / "proxy.conf"
        account = SWIFT_KEY_ID.replace(":", "_")
        region = CREDENTIALS["AWS_DEFAULT_REGION"]
        config.write_text(
            PROXY.format(
                folder=folder, port=proxy_port, region=region, account=account, secret=SECRET
            )
        )
        commands.append(("swift-proxy-server", str(config)))
        with servers(folder, commands, proxy_port) as endpoint:
            yield endpoint


@contextmanager
def running_rclone() -> Iterator[str]:
    """Run rclone before an empty folder; yield the endpoint URL of its S3 gateway."""
    port = free_port()
    with TemporaryDirectory(prefix="rclone-") as place:
        (folder := Path(place, "served")).mkdir()
        options = ("--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY_ID},{SECRET}")
        none = ("--config", "/dev/null")
        with servers(Path(place), [("rclone", "serve", "s3", *options, *none, str(folder))], port):
            yield f"http://127.0.0.1:{port}"


def program(name: str) -> str:
    """Return the path of a server's program; the test fails where it is not installed."""
    if not (path := PROGRAMS / name).exists():
        pytest.fail(f"{path} not found: make .venv-stores/.ready")
    return str(path)


@contextmanager
def servers(logs: Path, commands: list[tuple[str, ...]], port: int) -> Iterator[str]:
    """Run programs until the caller is done; yield the URL when the last one answers."""
    running: list[subprocess.Popen[bytes]] = []
    endpoint = f"http://127.0.0.1:{port}"
    try:
        for name, *arguments in commands:
            # Killed by the kernel if we are killed.
            tied = ("setpriv", "--pdeathsig", "KILL", "--", program(name))
            with (logs / f"{name}.log").open("wb") as log:
                running.append(subprocess.Popen([*tied, *arguments], stdout=log, stderr=log))
        deadline = time.monotonic() + START_LIMIT_S
        while not answers(endpoint):
            if time.monotonic() > deadline or any(each.poll() is not None for each in running):
                said = "\n".join(log.read_text()[-500:] for log in logs.glob("*.log"))
                raise RuntimeError(f"{commands[-1][0]} did not start: {said}")
            time.sleep(0.05)
        yield endpoint
    finally:
        for each in reversed(running):
            each.kill()
            each.wait(START_LIMIT_S)


def answers(endpoint: str) -> bool:
    """Whether a server answers, be it by an error."""
    try:
        urllib.request.urlopen(endpoint, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
