#!/bin/bash
# Install megahour on a host of EMR, when the cluster starts: install_host.sh CODE_URI FOLDER [EXTRAS]
# CODE_URI holds what `make dist` wrote, and recipes and cluster files of your own.
set -euo pipefail
code_uri=$1
folder=$2
sudo mkdir -p "$folder"
sudo chown "$(id -u)" "$folder" "$(dirname "$folder")"
aws s3 cp --recursive --only-show-errors "$code_uri" "$folder" --exclude '*.tar.gz'
venv=$(dirname "$folder")/venv
# The wheel was built for one minor version of Python.
wheels=("$folder"/megahour-*.whl)
version=$(sed -E 's/.*-cp([0-9])([0-9]+)-cp.*/\1.\2/' <<< "${wheels[0]}")
"python$version" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --constraint "$folder/constraints.txt" "${wheels[0]}${3:+[$3]}"
