#!/usr/bin/env bash
# Make .venv with everything this project needs; quick when nothing changed. Called by the Makefile. VENV names another
# folder.
#
# On NVIDIA's PyTorch container the environment sees the container's packages, and the container's torch, Transformer
# Engine, nvidia-resiliency-ext and friends are pinned to what is there, so nothing of them is ever replaced.
set -euo pipefail
cd "$(dirname "$0")/.."

UV_VERSION=0.13.8
venv=${VENV:-.venv}
stamp=$venv/.installed
wanted=$(cat requirements/*.txt pyproject.toml setup.py scripts/{bootstrap,install_in_container}.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null && exit 0

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
        /usr/bin/python3.12 /usr/local/bin/python3.12 /opt/python/cp312*/bin/python python3; do
        [ -n "$candidate" ] || continue
        # pyenv's shims are found on the PATH and fail when run, so each candidate is asked.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "bootstrap: no Python 3.12 found; install it (apt-get install python3.12-venv, or pyenv install 3.12)" \
        "or name one with PYTHON=/path/to/python3.12" >&2
    exit 2
}

python=$(find_python)
in_container=0
if [ -n "${NVIDIA_PYTORCH_VERSION:-}" ] && "$python" -c 'import torch' 2>/dev/null; then
    in_container=1
fi

if [ "$in_container" = 1 ]; then
    [ -x $venv/bin/python ] || "$python" -m venv --system-site-packages $venv
    PYTHON=$venv/bin/python scripts/install_in_container.sh --editable dev,report,tokenizers
else
    [ -x $venv/bin/python ] || "$python" -m venv $venv
    $venv/bin/python -m pip install --quiet "uv==$UV_VERSION"
    echo "bootstrap: installing $(grep -c == requirements/lock.txt) pinned packages into $venv" >&2
    # Compiled here once: where Python's own cache is off, every rank would compile a hundred thousand lines at its start.
    export UV_COMPILE_BYTECODE=1
    uv="$venv/bin/uv --quiet pip"
    $uv install --python $venv/bin/python --require-hashes --requirement requirements/lock.txt
    # Tagged for glibc 2.39; its Python modules run on older ones.
    $uv install --python $venv/bin/python --no-deps --python-platform "$(uname -m)-manylinux_2_39" \
        --require-hashes --requirement requirements/nvidia-resiliency-ext.txt
    $uv install --python $venv/bin/python --no-deps --no-build-isolation --editable . \
        --config-settings editable_mode=compat
fi
$venv/bin/python -m compileall -q megatron moevement_core moevement_cli kernels examples
# An editable install knows one root; the kernels have their own.
echo "$PWD/kernels" >"$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/moevement_kernels.pth"
echo "$wanted" >"$stamp"
