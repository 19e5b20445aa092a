"""The storage template expires the intermediates of each run that a user names, and of no other."""

from typing import Any

import cfnlint.decode

from pipeline.runs.names import (
    FEATURES_FOLDER,
    LATTICES_FOLDER,
    PARTITIONS_FOLDER,
    TARGETS_FOLDER,
)
from tests.infra.aws.role_policy import TEMPLATE

FOLDERS = {FEATURES_FOLDER, TARGETS_FOLDER, PARTITIONS_FOLDER, LATTICES_FOLDER}
NAMES = ("RunPrefix", "RunPrefix2", "RunPrefix3", "RunPrefix4")


def test_each_run_has_rules_of_its_own() -> None:
    """Those of further runs are there if the user names these, and expire what the first's do."""
    template: Any
    template, errors = cfnlint.decode.decode(str(TEMPLATE.with_name("storage.yaml")))
    assert errors == []
    assert [each for each in template["Parameters"] if each.startswith("RunPrefix")] == [*NAMES]
    rules = template["Resources"]["Bucket"]["Properties"]["LifecycleConfiguration"]["Rules"]
    for name in NAMES:
        condition = f"HasRun{name.removeprefix('RunPrefix')}"
        named = rules
        if name != NAMES[0]:
            assert template["Conditions"][condition] == {
                "Fn::Not": [{"Fn::Equals": [{"Ref": name}, ""]}]
            }
            named = [
                each["Fn::If"][1] for each in rules if each.get("Fn::If", [""])[0] == condition
            ]
        places = {
            each["Prefix"]["Fn::Sub"]: each["ExpirationInDays"]
            for each in named
            if isinstance(each.get("Prefix"), dict)
        }
        days = {"Ref": "IntermediateDays"}
        assert places == {f"${{{name}}}/{folder}/": days for folder in FOLDERS}
