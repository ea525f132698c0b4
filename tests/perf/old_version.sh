#!/usr/bin/env bash
# Copies a version of the package under another name, so that table.py can load both.
# Usage: tests/perf/old_version.sh COMMIT FOLDER; then python3 -m pip install --no-build-isolation --no-deps FOLDER
set -euo pipefail
commit=${1:?usage: tests/perf/old_version.sh COMMIT FOLDER}
folder=${2:?usage: tests/perf/old_version.sh COMMIT FOLDER}
rm -rf "$folder"
mkdir -p "$folder"
git archive "$commit" uncut_mpi CMakeLists.txt pyproject.toml README.md LICENSE | tar -x -C "$folder"
mv "$folder/uncut_mpi" "$folder/uncut_old"
grep -rlZ 'uncut[_-]mpi' "$folder" | xargs -0 sed -i 's/uncut_mpi/uncut_old/g; s/uncut-mpi/uncut-old/g'
# Types of two modules in one domain of nanobind would be one.
grep -q NB_DOMAIN "$folder/CMakeLists.txt" || sed -i 's/nanobind_add_module(_native/& NB_DOMAIN uncut_old/' "$folder/CMakeLists.txt"
