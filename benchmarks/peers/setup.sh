#!/usr/bin/env bash
# Make .venv.peers with the systems that benchmarks/peers measures; this project does not need them. FOLDER: another place.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.venv.peers}
"${PYTHON:-.venv/bin/python}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --requirement benchmarks/peers/requirements.txt
# Its wheel is tagged for glibc 2.39, but its Python modules run on older ones; what they import is in requirements.txt.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$folder/bin/python" -m pip install --quiet --no-deps --upgrade --target "$site" --only-binary :all: \
    --python-version 3.12 --platform "manylinux_2_39_$(uname -m)" nvidia-resiliency-ext==0.7.0
# In a folder of its own: torchrun imports its plug-in wherever it is installed, which would slow down the other systems.
"$folder/bin/python" -m pip install --quiet --no-deps --target "$folder/lm_resiliency" lm-resiliency==0.2.0
# Compiled here once: where Python's own cache is off, every rank would compile torch at its start, and each restart again.
"$folder/bin/python" -m compileall -q "$site" "$folder/lm_resiliency" || true  # a few files of torch are for other versions of Python
