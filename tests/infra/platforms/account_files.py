"""The account files that the pages of docs/running show."""

import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

PAGES = Path(__file__).parents[3] / "docs" / "running"


def account_text(platform: str) -> str:
    """Return the account file of a platform's page."""
    page = (PAGES / f"{platform}.md").read_text()
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    return block


@cache
def account_file(platform: str) -> str:
    """Return the path of a platform's account file."""
    path = Path(mkdtemp(prefix="accounts-")) / f"{platform}.toml"
    path.write_text(account_text(platform))
    return str(path)
