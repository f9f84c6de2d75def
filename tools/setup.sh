#!/usr/bin/env bash
# setup.sh VENV demo|test: everything that `make demo` or `make test` needs, from a fresh checkout.
# Needs git, make, a C++20 compiler and Python >= 3.10; what else the system must have it installs
# with apt when root, and names otherwise. Quick where all is there.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
what=$2
python=${PYTHON:-python3}
updated=

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

# need PACKAGE WHY [OPTION]: installs a Debian package, or says that it is missing.
need() {
  if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    say "installing $1 ($2)"
    [ -n "$updated" ] || apt-get update -qq || die "apt-get update failed; install $1 ($2)"
    updated=1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq ${3:-} "$1" > /dev/null || die "could not install $1 ($2)"
  else
    die "missing: $2. On Debian and Ubuntu: apt-get install $1"
  fi
}

command -v "$python" > /dev/null || need python3 "Python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
  || die "$python is $("$python" --version 2>&1); Python >= 3.10 is wanted: set PYTHON=/path/to/python3"
command -v "${CXX:-c++}" > /dev/null || need g++ "a C++20 compiler"
echo 'int main() { auto f = []<class T>(T x) { return x; }; return f(0); }' \
  | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - \
  || die "${CXX:-c++} takes no C++20; set CXX to a newer compiler (g++ >= 11, clang++ >= 14)"
"$python" -c 'import os, sysconfig; raise SystemExit(
    not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
  || need python3-dev "Python's headers (Python.h)"
if [ ! -x "$venv/bin/python" ] || [ ! -x "$venv/bin/pip" ]; then
  "$python" -c 'import ensurepip, venv' 2> /dev/null || need python3-venv "Python's venv module"
  "$python" -m venv --clear "$venv"
fi
if [ "$what" = test ]; then
  echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -std=c++20 -x c++ -fsyntax-only - 2> /dev/null \
    || need libgtest-dev "GoogleTest"
  for browser in chromium chromium-browser google-chrome chrome chromium-headless-shell; do
    command -v $browser > /dev/null && break
  done || need chromium "a browser, which draws the pages that are tested" --no-install-recommends
  export PLAIT_BUILD_TESTS=ON
fi

# Python packages: once, and again when pyproject.toml changes.
stamp="$venv/installed-$what"
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
  say "installing Python packages into $venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -U "pip>=25.1"
  groups="--group build"
  [ "$what" = demo ] || groups="$groups --group test"
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install -q --disable-pip-version-check $groups
  touch "$stamp"
fi

# The package itself: an incremental build, so that what runs is always this tree.
say "building plait (C++; minutes the first time, seconds after)"
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m pip install -q --disable-pip-version-check \
  --no-build-isolation -e .
