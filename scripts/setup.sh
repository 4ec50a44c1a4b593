#!/usr/bin/env bash
# Creates .venv and installs TileGym into it, editable, with everything that running, testing and linting need.
#
#   PYTHON=python3.12 scripts/setup.sh
#
# Packages are installed by uv, in a tenth of pip's time, from where pip is configured to look; where uv cannot be had,
# does not manage, or is not wanted (UV=0), by pip.
#
# PYTHON is the interpreter to build on (default: python3; if that one is unsuitable, python3.14 to python3.10).
# A torch that this interpreter already has is kept. Otherwise torch is installed: the newest one on a machine with an
# NVIDIA GPU, else the CPU build of TORCH_CPU_VERSION. pip looks where it is configured to look; on Linux set
# PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index to be sure of the small CPU build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_CPU_VERSION=2.13.0
# Its data models alone are used, by tests; what it depends on (flashinfer and a CUDA toolchain) is left out.
FLASHINFER_BENCH_VERSION=0.1.2
VENV=.venv
BY_UV=()

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

suits() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' >/dev/null 2>&1
}

has_torch() {
    "$1" -c 'import torch; v = torch.__version__.split("."); raise SystemExit((int(v[0]), int(v[1])) < (2, 9))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.14. Name another one: make PYTHON=python3.12"
        return
    fi
    for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
        if suits "$candidate"; then
            PYTHON=$candidate
            return
        fi
    done
    fail "no Python 3.10 to 3.14 found (python3 is $(python3 --version 2>&1 || true))." \
        "Install one, or name it: make PYTHON=/path/to/python3.12"
}

create_venv() {
    local flags=() site
    if has_torch "$PYTHON"; then
        say "Keeping the torch that $PYTHON has"
        flags=(--system-site-packages)
    fi
    say "Creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv ${flags[@]+"${flags[@]}"} "$VENV" ||
        fail "python -m venv failed. On Debian and Ubuntu: apt install python3-venv"
    if [ ${#flags[@]} -gt 0 ] && ! has_torch "$VENV/bin/python"; then
        # $PYTHON is itself in a virtual environment, whose packages --system-site-packages does not include.
        site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/parent-environment.pth"
    fi
}

# Lets uv look where pip would, and choose as pip does.
prepare_uv() {
    local variable name value configured
    [ "${UV:-1}" != 0 ] && "$VENV/bin/python" -m pip install --quiet uv >/dev/null 2>&1 || return 0
    "$VENV/bin/uv" --version >/dev/null 2>&1 || return 0
    configured=$("$VENV/bin/python" -m pip config list 2>/dev/null || true)  # its environment's before its files'
    while read -r variable name; do
        value=$(sed -n "s/^[^=]*\.$name='\(.*\)'\$/\1/p" <<<"$configured" | head -n 1 | sed 's/\\n/ /g; s/^ *//; s/ *$//')
        [ -z "$value" ] || [ -n "${!variable:-}" ] || export "$variable=$value"
    done <<'END'
UV_DEFAULT_INDEX index-url
UV_INDEX extra-index-url
UV_FIND_LINKS find-links
UV_CONSTRAINT constraint
UV_INSECURE_HOST trusted-host
UV_NO_INDEX no-index
SSL_CERT_FILE cert
ALL_PROXY proxy
UV_HTTP_TIMEOUT default-timeout
END
    [ -z "${UV_FIND_LINKS:-}" ] || export UV_FIND_LINKS="${UV_FIND_LINKS// /,}"
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    BY_UV=("$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python")
}

install() {
    if [ ${#BY_UV[@]} -gt 0 ]; then
        "${BY_UV[@]}" "$@" && return
        say "uv did not manage; by pip:"
    fi
    "$VENV/bin/python" -m pip install "$@"
}

install_torch() {
    if has_torch "$VENV/bin/python"; then
        say "torch is there already: $("$VENV/bin/python" -c 'import torch; print(torch.__version__)')"
    elif [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then
        say "Installing torch for the NVIDIA GPU of this machine (about 3 GB)"
        install "torch>=2.9"
    else
        say "Installing torch $TORCH_CPU_VERSION for the CPU: no NVIDIA GPU found"
        # The +cpu build where pip is configured to find it; elsewhere (macOS, a plain index) the release as it is.
        install "torch==$TORCH_CPU_VERSION+cpu" 2>/dev/null || {
            say "There is no +cpu build; installing the release as it is (on Linux with CUDA's libraries, about 3 GB)"
            install "torch==$TORCH_CPU_VERSION"
        }
    fi
}

find_python
if [ -x "$VENV/bin/python" ] && suits "$VENV/bin/python"; then
    say "Using the $VENV that is there"
else
    rm -rf "$VENV"
    create_venv
fi
# uv does not see the packages of an environment behind this one.
grep -q "include-system-site-packages = true" "$VENV/pyvenv.cfg" || prepare_uv
install_torch
say "Installing TileGym and its development packages"
# No other torch than the one that is there, whatever the packages' wishes are.
"$VENV/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
    >"$VENV/torch-constraint.txt"
install --constraint "$VENV/torch-constraint.txt" -e ".[dev]"
install --no-deps "flashinfer-bench==$FLASHINFER_BENCH_VERSION"
# The ruff of the environment that torch is taken from has its command there, not here.
[ -x "$VENV/bin/ruff" ] || "$VENV/bin/python" -m pip install --no-deps --ignore-installed "ruff>=0.14"
say "Set up. The commands below run in $VENV; to use it yourself: source $VENV/bin/activate"
