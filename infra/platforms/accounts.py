"""The platforms by name, and the account files that choose among them."""

from collections.abc import Mapping

from infra.platforms.databricks import Databricks
from infra.platforms.dataproc import Dataproc
from infra.platforms.emr import Emr
from infra.platforms.emr_serverless import EmrServerless
from infra.platforms.kubernetes import Kubernetes
from infra.platforms.platform import Platform
from infra.platforms.slurm import Slurm
from infra.settings import ConfigurationError, read_record, read_toml, shown

PLATFORMS: Mapping[str, type[Platform]] = {
    "emr": Emr,
    "emr_serverless": EmrServerless,
    "databricks": Databricks,
    "dataproc": Dataproc,
    "kubernetes": Kubernetes,
    "slurm": Slurm,
}


def load_account(path: str) -> Platform:
    """Read an account's TOML file; ConfigurationError if `read_record` refuses it."""
    table = read_toml(path)
    name = table.get("platform")
    if not (isinstance(name, str) and name in PLATFORMS):
        need = f"need one of {', '.join(PLATFORMS)}"
        raise ConfigurationError(f"{path}: platform = {shown(name)}: {need}")
    rest = {key: each for key, each in table.items() if key != "platform"}
    return read_record(PLATFORMS[name], rest, path)
