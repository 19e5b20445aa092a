"""The folder of a device pool, held and removed by many processes."""

import subprocess
import sys
from pathlib import Path

from infra.devices.pool_folder import held, remove_abandoned


def test_a_folder_that_is_removed_and_held_at_once_is_there(tmp_path: Path) -> None:
    """Of 500 holders beside a process that removes all it can, each has its folder."""
    program = "import sys; from pathlib import Path; from infra.devices import pool_folder\n"
    program += "while True: pool_folder.remove_abandoned(Path(sys.argv[1]))"
    remover = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        for _ in range(500):
            with held(tmp_path / "pool"):
                (tmp_path / "pool" / "file").write_bytes(b"")
    finally:
        remover.kill()
        remover.wait()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
