#!/bin/bash
# Install megahour on a host of EMR, when the cluster starts:
#   install_host.sh CODE_URI FOLDER REQUIREMENT...
# CODE_URI holds what `make dist` wrote, and recipes and cluster files of your own. The requirements
# are the step's; pyspark is none of them, as the release has its own.
set -euo pipefail
code_uri=$1
folder=$2
shift 2
sudo mkdir -p "$folder"
sudo chown "$(id -u)" "$folder" "$(dirname "$folder")"
aws s3 cp --recursive --only-show-errors "$code_uri" "$folder" --exclude '*.tar.gz'
venv=$(dirname "$folder")/venv
# The wheel was built for one minor version of Python.
wheels=("$folder"/megahour-*.whl)
python=python$(sed -E 's/.*-cp([0-9])([0-9]+)-cp.*/\1.\2/' <<< "${wheels[0]}")
command -v "$python" > /dev/null || sudo dnf install --assumeyes --quiet "$python"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --no-deps "${wheels[0]}"
"$venv/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" "$@"
