"""Make an environment in which no Java can be found, for tests."""

import os
import sys
from pathlib import Path


def java_free_environment(directory: Path) -> dict[str, str]:
    """Return this environment with an empty JAVA_HOME and a PATH that holds all but java."""
    programs = directory / "programs"
    programs.mkdir()
    for source in (Path("/usr/bin"), Path("/bin")):
        for program in source.iterdir():
            link = programs / program.name
            if program.name != "java" and not link.is_symlink():
                link.symlink_to(program)
    path = os.pathsep.join([str(Path(sys.executable).parent), str(programs)])
    repository = str(Path(__file__).parents[3])
    return {**os.environ, "JAVA_HOME": "", "PATH": path, "PYTHONPATH": repository}
