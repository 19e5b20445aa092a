"""Run a real S3 server for tests: Ceph's radosgw, with its own monitor and in-memory disk."""

import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.s3_server import CREDENTIALS, free_port, fresh_bucket

COMMAND_LIMIT_S = 60.0
START_LIMIT_S = 300.0
PROGRAMS = ("ceph-authtool", "monmaptool", "ceph-mon", "ceph-osd", "ceph", "radosgw")
SETTINGS = """\
[global]
fsid = {cluster_id}
mon host = [v2:127.0.0.1:{monitor_port},v1:127.0.0.1:{old_monitor_port}]
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
run dir = {folder}/run
crash dir = {folder}/crash
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd memory target = 939524096
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {folder}/rgw
rgw enable ops log = false
rgw thread pool size = 64
"""
ADMIN = ("mon", "allow *", "osd", "allow *", "mds", "allow *", "mgr", "allow *")
ACCOUNTS = {
    "mon.": ("mon", "allow *"),
    "client.admin": ADMIN,
    "osd.0": ("mon", "allow profile osd", "osd", "allow *"),
    "client.rgw.a": ("mon", "allow rw", "osd", "allow rwx"),
}


class _Ceph:
    """_Ceph is one cluster in one folder; its three daemons are our children and end with us."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start monitor, disk and gateway, and make a user with the tests' credentials."""
        cluster_id, disk_id = str(uuid.uuid4()), str(uuid.uuid4())
        for name in ("mon", "osd", "run", "rgw", "log", "crash"):
            (self.folder / name).mkdir()
        monitors = free_port(), free_port()
        self._write_settings(cluster_id, *monitors)
        self._write_keys()
        self._start_monitor(cluster_id, *monitors)
        self._start_disk(disk_id)
        self._daemon("radosgw", "-n", "client.rgw.a")
        key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
        user = ("--uid", "test", "--display-name", "test")
        keys = ("--access-key", key, "--secret-key", secret)
        self._run("radosgw-admin", *self._settings, "-n", "client.rgw.a", "user", "create",
                  *user, *keys)  # fmt: skip
        self._wait_for(self._answers, "radosgw did not answer")

    def stop(self) -> None:
        """Kill the daemons, the last one first."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait(COMMAND_LIMIT_S)

    def _write_settings(self, cluster_id: str, monitor_port: int, old_monitor_port: int) -> None:
        text = SETTINGS.format(
            cluster_id=cluster_id,
            folder=self.folder,
            monitor_port=monitor_port,
            old_monitor_port=old_monitor_port,
            port=self.port,
        )
        (self.folder / "ceph.conf").write_text(text)

    def _write_keys(self) -> None:
        keyring = str(self.folder / "keyring")
        self._run("ceph-authtool", "--create-keyring", keyring)
        for account, permissions in ACCOUNTS.items():
            pairs = zip(permissions[::2], permissions[1::2], strict=True)
            options = [part for pair in pairs for part in ("--cap", *pair)]
            self._run("ceph-authtool", keyring, "--gen-key", "-n", account, *options)

    def _start_monitor(self, cluster_id: str, port: int, old_port: int) -> None:
        monitor_map, keyring = str(self.folder / "monmap"), str(self.folder / "keyring")
        addresses = f"[v2:127.0.0.1:{port},v1:127.0.0.1:{old_port}]"
        create = ("--create", "--clobber", "--fsid", cluster_id)
        self._run("monmaptool", *create, "--addv", "a", addresses, monitor_map)
        made_from = ("--monmap", monitor_map, "--keyring", keyring)
        self._run("ceph-mon", *self._settings, "--mkfs", "-i", "a", *made_from)
        self._daemon("ceph-mon", "-i", "a")

    def _start_disk(self, disk_id: str) -> None:
        self._run("ceph", *self._settings, "osd", "new", disk_id)
        self._run("ceph-osd", *self._settings, "-i", "0", "--mkfs", "--osd-uuid", disk_id)
        self._daemon("ceph-osd", "-i", "0")
        place = ("osd.0", "1.0", "host=h", "root=default")
        self._run("ceph", *self._settings, "osd", "crush", "add", *place)

    @property
    def _settings(self) -> tuple[str, str]:
        return "-c", str(self.folder / "ceph.conf")

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=COMMAND_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")

    def _daemon(self, *command: str) -> None:
        # In the foreground, and killed by the kernel if we are killed.
        tied = ("setpriv", "--pdeathsig", "KILL", "--", command[0], *self._settings, "-f")
        with (self.folder / "log" / f"{command[0]}.out").open("wb") as log:
            self._daemons.append(subprocess.Popen([*tied, *command[1:]], stdout=log, stderr=log))

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def _wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            ended = [daemon for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{problem} within {START_LIMIT_S:g} s: {self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        logs = sorted((self.folder / "log").iterdir())
        return "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in logs)


@contextmanager
def running_ceph() -> Iterator[str]:
    """Run a Ceph cluster of one host; yield the endpoint URL of its S3 gateway, or skip."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: run tests/install_packages.sh as root")
    with TemporaryDirectory(prefix="ceph-") as folder:
        ceph = _Ceph(Path(folder))
        try:
            ceph.start()
            yield ceph.endpoint
        finally:
            ceph.stop()


@pytest.fixture(scope="session")
def ceph_endpoint() -> Iterator[str]:
    """Return the endpoint URL of the session's Ceph."""
    with running_ceph() as endpoint:
        yield endpoint


@pytest.fixture
def ceph_bucket(ceph_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a fresh bucket's name; the environment points boto3 and s3fs to its server."""
    return fresh_bucket(ceph_endpoint, monkeypatch)
