#!/usr/bin/env bash
# Install this project into an environment that brings its own torch: NVIDIA's PyTorch container, or a virtual
# environment on top of it. What is there stays as it is, because it was built for that machine: every installed package
# is a constraint, only what pyproject.toml asks for and the environment lacks is added, and in the end nothing may have
# another version than before.
#
#   scripts/install_in_container.sh [--editable] [EXTRA,...]      extras of pyproject.toml (default: megatron,restart)
#
# PYTHON names the interpreter (default: python3). The Dockerfile and scripts/bootstrap.sh run this, and
# tests/packaging/test_container.py does what the Dockerfile says without Docker.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
editable=()
if [ "${1:-}" = --editable ]; then
    editable=(--editable)
    shift
fi
extras=${1-megatron,restart}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
    echo "install_in_container: $*" >&2
    exit 2
}

installed() {
    "$python" -m pip list --format=freeze --exclude moevement-megatron 2>/dev/null | sort
}

# The requirements of pyproject.toml with those of the extras, an extra's own extras included.
requirements() {
    "$python" - "$extras" <<'PYTHON'
import re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
known = project["optional-dependencies"]
pending, requirements = [extra for extra in sys.argv[1].split(",") if extra], list(project["dependencies"])
while pending:
    if (extra := pending.pop()) not in known:
        sys.exit(f"install_in_container: {extra}: no such extra; give some of {', '.join(known)}")
    for requirement in known[extra]:
        own = re.fullmatch(re.escape(project["name"]) + r"\[(.*)\]", requirement)
        if own:
            pending += own[1].split(",")
        else:
            requirements.append(requirement)
print(*requirements, sep="\n")
PYTHON
}

"$python" -c 'import torch' || fail "$python has no torch; this is for environments that bring their own (make setup makes one that does not)"
installed >"$work/before"
requirements >"$work/requirements" || exit 2

# Its other requirements are those of services that nothing here uses. Its wheels are tagged for glibc 2.39, and its
# Python modules run on older ones; pip takes another platform's wheel only into a folder that is named.
if grep -q '^nvidia-resiliency-ext' "$work/requirements" && ! grep -qi '^nvidia[-_.]resiliency[-_.]ext==' "$work/before"; then
    "$python" -m pip install --quiet --no-deps --only-binary=:all: --platform "manylinux_2_39_$(uname -m)" \
        --target "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
        --requirement requirements/nvidia-resiliency-ext.txt
fi

# A release of Megatron that nobody has tried is not taken because it is new; one that is there is.
cat "$work/before" >"$work/constraints"
grep -q '^megatron-core==' "$work/before" || grep -o '^megatron-core==[^ ]*' requirements/lock.txt >>"$work/constraints"

grep -v '^nvidia-resiliency-ext' "$work/requirements" >"$work/missing"
"$python" -m pip install --quiet --constraint "$work/constraints" --requirement "$work/missing"
"$python" -m pip install --quiet --no-deps "${editable[@]}" . \
    ${editable:+--config-settings editable_mode=compat}

installed >"$work/after"
changed=$(comm -23 "$work/before" "$work/after")
[ -z "$changed" ] || fail "the environment's own packages were changed: ${changed//$'\n'/ }"
modules=(megatron.moevement moevement_core moevement_cli)
! grep -q '^megatron-core' "$work/requirements" || modules+=(megatron.core)
! grep -q '^nvidia-resiliency-ext' "$work/requirements" || modules+=(nvidia_resiliency_ext)
"$python" -c "import $(IFS=,; echo "${modules[*]}")"
